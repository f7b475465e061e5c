"""What each rank runs in the tests of collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from tests.collectives.cases import Case
from tfdist import operations, world
from tfdist.collectives.base import ReduceOp


def op_named(name: str) -> ReduceOp:
    return getattr(operations, name)


def run_case(case: Case, tensor: Any) -> Any:
    """Calls the public function; runs eagerly and inside tf.function."""
    root = case.root % tfdist.size()
    if case.kind == "allreduce":
        return tfdist.allreduce(tensor, op=op_named(case.op))
    if case.kind == "reduce":
        return tfdist.reduce(tensor, root, op=op_named(case.op))
    if case.kind == "reducescatter":
        return tfdist.reducescatter(tensor, op=op_named(case.op))
    if case.kind == "broadcast":
        return tfdist.broadcast(tensor, root)
    if case.kind == "allgather":
        return tfdist.allgather(tensor)
    splits = case.splits(tfdist.rank(), tfdist.size())
    received, counts = tfdist.alltoall(tensor, splits=tf.constant(splits, tf.int32))
    with tf.control_dependencies([tf.debugging.assert_equal(tf.reduce_sum(counts), tf.shape(received)[0])]):
        return tf.identity(received)


def run_cases(cases: list[Case]) -> list[np.ndarray]:
    """Runs cases one after the other, eagerly or each in a function of its own."""
    results = []
    for case in cases:
        print(case, flush=True)  # shown when it hangs
        tensor = tf.constant(case.tensor(tfdist.rank(), tfdist.size()))
        if case.mode == "eager":
            result = run_case(case, tensor)
        else:
            shape = tensor.shape if case.mode == "graph" else [None] * tensor.shape.rank
            traced = tf.function(
                lambda x, case=case: run_case(case, x), input_signature=[tf.TensorSpec(shape, tensor.dtype)]
            )
            result = traced(tensor)
        results.append(result.numpy())
    return results


def run_together(cases: list[Case]) -> list[np.ndarray]:
    """Runs all cases in one function, so that they are in flight at the same time."""
    tensors = [tf.constant(case.tensor(tfdist.rank(), tfdist.size())) for case in cases]

    @tf.function
    def together(*inputs: Any) -> list[Any]:
        return [run_case(case, x) for case, x in zip(cases, inputs, strict=True)]

    return [result.numpy() for result in together(*tensors)]


def engine_primitives() -> dict[str, Any]:
    """The engine's own methods, without anything above it."""
    current = world.current()
    engine, group, rank, size = current.engine, current.everyone, tfdist.rank(), tfdist.size()
    engine.start()
    engine.start()
    mixed = [
        tf.fill([3], float(rank)),
        tf.constant(rank, tf.int64),
        tf.zeros([0, 2]),
        tf.fill([2, 2], rank + 0.5),
    ]
    results: dict[str, Any] = {"allreduce": engine.allreduce(mixed, ReduceOp.SUM, name="a", group=group)}
    rows = tf.fill([rank + 1, 2], rank)
    results["allgather"] = engine.allgather(rows, name="b", group=group)
    results["allgather known"] = engine.allgather(
        rows, name="c", group=group, lengths=[other + 1 for other in range(size)]
    )
    results["broadcast"] = engine.broadcast(
        [tf.fill([2], rank), tf.constant(rank == size - 1), tf.fill([0], 1.0)],
        size - 1,
        name="d",
        group=group,
    )
    results["alltoall"] = engine.alltoall(
        tf.fill([size * 2], rank), tf.fill([size], 2), name="e", group=group
    )
    results["reducescatter"] = engine.reducescatter(
        tf.range(size + 1, dtype=tf.float32), ReduceOp.MAX, name="f", group=group
    )
    results["exchange"] = exchange("eager")
    results["exchange in a graph"] = tf.function(lambda: exchange("graph"))()
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), results)


def exchange_size(source: int, target: int) -> int:
    """How many values one rank sends to another: some of them none, and every rank gets nothing from some."""
    return 0 if source == target else (source + 2 * target) % 3


def exchange(name: str) -> list[Any]:
    """What every rank got from each, in dtypes of several sizes; empty for nothing."""
    current, rank, size = world.current(), tfdist.rank(), tfdist.size()
    results = []
    for dtype in (tf.float32, tf.float16, tf.int64):
        outgoing = [
            tf.fill([exchange_size(rank, target)], tf.cast(10 * rank + target, dtype))
            if exchange_size(rank, target)
            else None
            for target in range(size)
        ]
        incoming = [exchange_size(source, rank) for source in range(size)]
        received = current.engine.exchange(outgoing, incoming, name=name, group=current.everyone, dtype=dtype)
        results += [tf.zeros([0], dtype) if each is None else each for each in received]
    return results


def bits_survive() -> dict[str, bool]:
    """NaN with a payload, signed zero, infinity and denormals, from the root to everybody."""
    patterns = {
        "float32": np.array([0x7FC12345, 0x80000000, 0x7F800000, 1, 0xFFFFFFFF], np.uint32).view(np.float32),
        "float64": np.array([0x7FF8000000012345, 1 << 63, 1], np.uint64).view(np.float64),
        "float16": np.array([0x7E01, 0x8000, 1], np.uint16).view(np.float16),
        "int8": np.array([-128, 127, 0], np.int8),
        "uint16": np.array([65535, 1], np.uint16),
        "uint32": np.array([2**32 - 1], np.uint32),
        "uint64": np.array([2**64 - 1], np.uint64),
        "complex64": np.array([1 - 2j, 0], np.complex64),
        "complex128": np.array([1 - 2j], np.complex128),
    }
    survived = {}
    for name, pattern in patterns.items():
        here = pattern if tfdist.rank() == 0 else np.zeros_like(pattern)
        moved = tfdist.broadcast(tf.constant(here), 0).numpy()
        gathered = tfdist.allgather(tf.constant(pattern)).numpy()
        survived[name] = (
            moved.tobytes() == pattern.tobytes() and gathered.tobytes() == pattern.tobytes() * tfdist.size()
        )
    return survived


def gradients(kind: str, op: str, mode: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input, weights of this rank's loss, and the gradient of sum(weights * result) by the input."""
    rank, size = tfdist.rank(), tfdist.size()
    generator = np.random.default_rng(100 + rank)
    rows = rank + 1 if kind == "allgather" else size * 2
    x = tf.constant(generator.standard_normal([rows, 2]).astype(np.float32))
    case = Case(kind, "float32", (rows, 2), op=op, root=size - 1, rows=(2,))

    def loss_gradient(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = run_case(case, x)
            shape = tf.shape(result)
            weights = tf.reshape(tf.range(tf.size(result), dtype=tf.float32), shape) + 10.0 * rank
            loss = tf.reduce_sum(weights * result)
        return weights, tape.gradient(loss, x)

    function = loss_gradient if mode == "eager" else tf.function(loss_gradient)
    weights, gradient = function(x)
    return x.numpy(), weights.numpy(), gradient.numpy()


def second_gradient() -> float:
    """d²/dx² of the sum over ranks of x³: 6x summed over ranks, through two nested tapes."""
    x = tf.constant(2.0 + tfdist.rank())
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tfdist.allreduce(x**3, op=tfdist.Sum) / tfdist.size()
        first = inner.gradient(y, x)
    return float(outer.gradient(first, x))


def indexed_slices(mode: str, op: str) -> tuple[np.ndarray, np.ndarray]:
    """Sparse all-reduce with another number of rows on every rank; returns (dense result, dense mean)."""
    rank = tfdist.rank()
    indices = tf.range(rank + 1)
    values = tf.fill([rank + 1, 3], rank + 1.0)

    def reduce(values: Any, indices: Any) -> Any:
        slices = tf.IndexedSlices(values, indices, tf.constant([tfdist.size() + 1, 3]))
        return tf.convert_to_tensor(tfdist.allreduce(slices, op=op_named(op)))

    function = reduce if mode == "eager" else tf.function(reduce)
    return function(values, indices).numpy()


def grouped_mixture() -> list[np.ndarray]:
    """Many tensors of several dtypes and sizes, one of them larger than a bucket, in one call."""
    rank = tfdist.rank()
    tensors = [tf.fill([size], tf.cast(rank + 1, dtype)) for dtype in ("float32", "int64", "float16")
               for size in (0, 1, 7, 100_000)]  # fmt: skip
    tensors += [tf.fill([3_000_000], float(rank)), tf.constant(rank + 1)]
    results = tfdist.grouped_allreduce(tensors, op=tfdist.Sum)
    return [np.unique(result.numpy()) for result in results]


def compressed(kind: str) -> tuple[str, np.ndarray, int]:
    """All-reduce in 16 bits of a float and of an integer."""
    compression = getattr(tfdist.Compression, kind)
    result = tfdist.allreduce(
        tf.constant([1.0, 2.0]) * (tfdist.rank() + 1), op=tfdist.Sum, compression=compression
    )
    whole = tfdist.allreduce(tf.constant(100_000), op=tfdist.Sum, compression=compression)
    return result.dtype.name, result.numpy(), int(whole)


def scaled() -> np.ndarray:
    """Factors before and after."""
    return tfdist.allreduce(
        tf.constant([float(tfdist.rank())]), op=tfdist.Sum, prescale_factor=2.0, postscale_factor=0.5
    ).numpy()


def objects() -> tuple[Any, list[Any]]:
    """Objects of different size on every rank."""
    rank = tfdist.rank()
    return (
        tfdist.broadcast_object({"rank": rank, "text": "x" * 3000}, root_rank=tfdist.size() - 1),
        tfdist.allgather_object(["r"] * rank),
    )


def barriers() -> bool:
    """Barriers, eagerly and in a function."""
    tfdist.barrier()
    tfdist.barrier(name="named")

    @tf.function
    def wait() -> Any:
        with tf.control_dependencies([tfdist.barrier()]):
            return tf.constant(True)

    return bool(wait())


def process_sets() -> dict[str, Any]:
    """Two disjoint sets at work at once, then an ordinary collective, then removal."""
    rank, size = tfdist.rank(), tfdist.size()
    even = tfdist.add_process_set(list(range(0, size, 2)))
    odd = tfdist.add_process_set(tfdist.ProcessSet(range(1, size, 2)))
    own, other = (even, odd) if rank % 2 == 0 else (odd, even)
    results: dict[str, Any] = {"ids": (even.process_set_id, odd.process_set_id), "place": own.rank()}
    results["outside"] = other.rank()
    results["sum"] = float(tfdist.allreduce(tf.constant(float(rank)), op=tfdist.Sum, process_set=own))
    results["gather"] = tfdist.allgather(tf.fill([rank + 1], rank), process_set=own).numpy()
    results["broadcast"] = int(tfdist.broadcast(tf.constant(rank), own.ranks[-1], process_set=own))
    traced = tf.function(lambda x: tfdist.allreduce(x, process_set=own))
    results["graph"] = float(traced(tf.constant(float(rank))))
    try:
        tfdist.allreduce(tf.constant(1.0), process_set=other)
    except tfdist.TfdistError as error:
        results["error"] = str(error)
    results["all"] = float(tfdist.allreduce(tf.constant(1.0), op=tfdist.Sum))
    try:
        tfdist.add_process_set(even)
    except tfdist.TfdistError as error:
        results["twice"] = str(error)
    results["removed"] = (tfdist.remove_process_set(even), tfdist.remove_process_set(odd), odd.process_set_id)
    return results


def mismatch(what: str) -> str:
    """One rank deviates; afterwards the world must still work."""
    odd_one = tfdist.rank() == tfdist.size() - 1
    x = tf.ones([3])
    try:
        if what == "shape":
            tfdist.allreduce(tf.ones([4 if odd_one else 3]))
        elif what == "dtype":
            tfdist.allreduce(tf.cast(x, tf.float64) if odd_one else x)
        elif what == "op":
            tfdist.allreduce(x, op=tfdist.Max if odd_one else tfdist.Sum, name="same name")
        elif what == "root":
            tfdist.broadcast(x, 1 if odd_one else 0)
        elif what == "kind":
            tfdist.allgather(x) if odd_one else tfdist.allreduce(x)
        elif what == "axes":
            tfdist.allgather(tf.ones([2, 2 if odd_one else 3]))
        elif what == "number":
            tfdist.grouped_allreduce([x] * (2 if odd_one else 1))
        elif what == "process set":
            tfdist.add_process_set([0] if odd_one else [1])
        return "no error"
    except tfdist.CollectiveMismatchError as error:
        total = float(tfdist.allreduce(tf.constant(1.0), op=tfdist.Sum))
        assert total == tfdist.size(), total
        return str(error)


def retrace(order: list[int]) -> list[list[float]]:
    """Traces one function for several shapes in this rank's order, then runs them in the common order."""

    @tf.function
    def reduce(x: Any) -> Any:
        return tfdist.allreduce(x, op=tfdist.Sum)

    for length in order:
        reduce.get_concrete_function(tf.TensorSpec([length]))
    return [reduce(tf.fill([length], tfdist.rank() + 1.0)).numpy().tolist() for length in sorted(order)]


def constants_on_the_first_rank() -> list[list[list[float]]]:
    """Each collective in a tf.function, run three times; rank 0 sends constants, the others what changes."""
    size = tfdist.size()
    changes = tf.Variable(tf.zeros([size]))

    @tf.function
    def each() -> list[Any]:
        sent = tf.ones([size]) if tfdist.rank() == 0 else changes.read_value()
        return [
            tfdist.allreduce(sent, op=tfdist.Sum),
            tfdist.allgather(sent),
            tfdist.broadcast(sent, 0),
            tfdist.reducescatter(sent, op=tfdist.Sum),
            tfdist.alltoall(sent, splits=[1] * size)[0],
        ]

    results = []
    for turn in range(3):
        changes.assign(tf.fill([size], float(turn)))
        results.append([result.numpy().tolist() for result in each()])
    return results


def trace_order(order: list[str]) -> dict[str, float]:
    """Traces different functions in this rank's order, then runs them in the common order."""

    @tf.function
    def doubled(x: Any) -> Any:
        return tfdist.allreduce(x * 2, op=tfdist.Sum)

    @tf.function
    def negated(x: Any) -> Any:
        return tfdist.allreduce(-x, op=tfdist.Sum)

    functions = {"doubled": doubled, "negated": negated}
    x = tf.constant(tfdist.rank() + 1.0)
    for name in order:
        functions[name].get_concrete_function(x)
    return {name: float(functions[name](x)) for name in sorted(functions)}


def same_function_twice(repetitions: int) -> bool:
    """A traced function called several times in another: the same collective is in flight several times."""

    @tf.function
    def inner(x: Any) -> Any:
        return tfdist.allreduce(x, op=tfdist.Sum)

    @tf.function
    def outer(x: Any) -> list[Any]:
        return [inner(x), inner(x + 1), inner(x + 2)]

    x, size = tf.fill([50], float(tfdist.rank())), tfdist.size()
    base = size * (size - 1) / 2
    for _ in range(repetitions):
        results = [float(result[7]) for result in outer(x)]
        assert results == [base, base + size, base + 2 * size], results
    return True


def same_name_twice() -> list[float]:
    """A name given to two collectives of one function."""

    @tf.function
    def reduce(x: Any) -> list[Any]:
        return [tfdist.allreduce(x * k, op=tfdist.Sum, name="twice") for k in (1.0, 10.0)]

    return [float(result) for result in reduce(tf.constant(1.0))]


def unused_on_some_ranks() -> float:
    """Collectives whose result only one rank uses: they must not be pruned on the others."""

    @tf.function
    def step(x: Any) -> Any:
        total = tfdist.allreduce(x, op=tfdist.Sum)
        shared = tfdist.broadcast(x, 0)
        rows = tfdist.allgather(x[tf.newaxis])
        tfdist.barrier()
        return total + shared + rows[0] if tfdist.rank() == 0 else x

    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(3):
            y = tfdist.allreduce(x)
            if tfdist.rank() == 0:
                x = y
        return x

    return float(step(tf.constant(1.0)) * loop(tf.constant(1.0)))


def in_control_flow() -> list[float]:
    """Collectives in a loop and in a branch."""

    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(3):
            x = tfdist.allreduce(x, op=tfdist.Sum)
        if tf.reduce_sum(x) > 0.0:
            x = tfdist.allreduce(x, op=tfdist.Max) + 1.0
        else:
            x = tfdist.allreduce(x, op=tfdist.Min) - 1.0
        return x

    return [float(loop(tf.constant(1.0))), float(loop(tf.constant(-1.0)))]


def compiled_by_xla() -> str:
    """A collective where XLA would compile it."""

    @tf.function(jit_compile=True)
    def compiled(x: Any) -> Any:
        return tfdist.allreduce(x)

    try:
        compiled(tf.constant(1.0))
    except tfdist.CollectiveError as error:
        return str(error)
    return "no error"


def derived_names() -> list[str]:
    """Names that a function with a branch, a loop and a nested function derives, at two traces."""
    from tfdist.operations.names import derive_name

    seen: list[str] = []

    @tf.autograph.experimental.do_not_convert
    def note() -> None:
        seen.append(derive_name("allreduce", None))

    @tf.function
    def step(x: Any) -> Any:
        note()
        if tf.reduce_sum(x) > 0.0:
            note()
        for _ in tf.range(2):
            note()
        for _ in range(2):
            note()
        return x

    step(tf.zeros([2]))
    step(tf.zeros([3]))
    return seen


def dynamic_shape_mismatch() -> str:
    """Sizes that only differ at run time, so that no announcement can tell."""

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def reduce(x: Any) -> Any:
        return tfdist.allreduce(x)

    try:
        reduce(tf.ones([3 + tfdist.rank()]))
    except Exception as error:
        explained = operations.translate(error)
        return f"{type(explained).__name__}: {explained}"
    return "no error"


def static_shape_mismatch() -> str:
    """Static shapes that differ inside a function."""

    @tf.function
    def reduce(x: Any) -> Any:
        return tfdist.allreduce(x)

    try:
        reduce(tf.ones([3 + tfdist.rank()]))
    except Exception as error:
        explained = operations.translate(error)
        return f"{type(explained).__name__}: {explained}"
    return "no error"


def absent(rank: int, mode: str) -> str:
    """One rank does not call the collective."""
    import time

    if tfdist.rank() == rank:
        time.sleep(10.0)
        return "absent"
    function = tf.function(lambda x: tfdist.allreduce(x)) if mode == "graph" else tfdist.allreduce
    try:
        function(tf.ones([3]))
    except Exception as error:
        explained = operations.translate(error)
        return f"{type(explained).__name__}: {explained}"
    return "no error"


def late(rank: int, seconds: float) -> tuple[str, float]:
    """One rank comes after the bound; the collective after it works."""
    import time

    if tfdist.rank() == rank:
        time.sleep(seconds)
    try:
        tfdist.allreduce(tf.ones(3), name="metric")
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, float(tfdist.allreduce(tf.constant(1.0), op=tfdist.Sum, name="afterwards"))


def dies(rank: int, mode: str) -> list[str]:
    """One rank is killed while others wait: their errors, in that collective, in a new one, in the engine."""
    import os
    import signal

    def allreduce(length: int) -> None:
        traced(tf.ones([length])) if mode == "graph" else tfdist.allreduce(tf.ones([length]))

    traced = tf.function(lambda x: tfdist.allreduce(x))
    allreduce(3)
    if tfdist.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for call in (lambda: allreduce(3), lambda: allreduce(4), world.current().engine.start):
        try:
            for _ in range(100):
                call()
        except Exception as error:
            explained = operations.translate(error)
            errors.append(f"{type(explained).__name__}: {explained}")
    return errors


def results_by_rank() -> dict[str, list[int]]:
    """Results whose order is that of ranks, for the world and for a process set on both sides of rank 10."""
    rank, size = tfdist.rank(), tfdist.size()
    some = tfdist.add_process_set([1, 2, 9, 10])
    results = {
        "gather": tfdist.allgather(tf.fill([rank % 3 + 1], rank)),
        "alltoall": tfdist.alltoall(tf.range(size) + 100 * rank),
        "scatter": tfdist.reducescatter(tf.range(size, dtype=tf.float32)),
    }
    if some.included():
        results["some"] = tfdist.allgather(tf.constant([rank]), process_set=some)
    return {name: result.numpy().tolist() for name, result in results.items()}
