"""Collectives that combine tensors: `allreduce`, `grouped_allreduce`, `reduce`, `reducescatter`.

Gradients are the mathematical adjoints: with a loss on every rank, the gradient of the sum of all ranks'
losses. So a model that communicates has on N ranks the gradients of one process that does the same with N
times the data and summed losses. (Horovod averages in the gradients of allgather and broadcast instead.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import world
from tfdist.collectives.base import Group, ReduceOp, split_rows
from tfdist.compression import Compression
from tfdist.errors import BackendUnavailableError, TfdistError
from tfdist.operations.agreement import Call, begin, describe, run_engine, uncompiled
from tfdist.process_sets import ProcessSet, global_process_set

Sum = ReduceOp.SUM
Average = ReduceOp.AVERAGE
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
LogicalAnd = ReduceOp.LOGICAL_AND
LogicalOr = ReduceOp.LOGICAL_OR
Adasum = ReduceOp.ADASUM

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Narrow integers are added in a wider dtype and cut back, which wraps around as they would themselves.
_WIDER = {"uint8": "int32", "int8": "int32", "uint16": "int32", "int16": "int32", "uint32": "int64"}
_LOGICAL = {LogicalAnd: Min, LogicalOr: Max}


@uncompiled
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combines a tensor over all ranks; every rank gets the same, bit-identical result.

    Who calls: every rank of `process_set`, with the same shape, dtype and operation. Works eagerly and inside
    `tf.function`; a shape that is only known at run time costs a second, small collective.
    Bytes: for K bytes and N ranks each rank sends and receives 2(N-1)/N·K (ring). IndexedSlices: (N-1) times
    the rank's own rows and indices.
    Gradient: the same reduction of the upstream gradients for Sum and Average; for Min and Max their sum where
    this rank holds the extreme value (divided among ties); Product has none.

    Args:
        tensor: tensor, variable or `tf.IndexedSlices` of any shape. Sum, Min, Max, Product: float16, bfloat16,
            float32, float64 and integers (which wrap around). Average: floats. LogicalAnd, LogicalOr: bool and
            integers, where non-zero is true and the result is 0 or 1. IndexedSlices: Sum and Average, which
            concatenate the rows of all ranks.
        average: Horovod's old form of `op`: True is Average, False is Sum.
        device_dense: device for the operations on tensors; where they are by default.
        device_sparse: device for the operations on IndexedSlices.
        compression: `tfdist.Compression.none`, `.fp16` or `.bf16`.
        op: `tfdist.Average` (default), `Sum`, `Min`, `Max`, `Product`, `LogicalAnd`, `LogicalOr`, or `Adasum`
            (Horovod engine only).
        prescale_factor: multiplies before the reduction; floats only.
        postscale_factor: multiplies after it; floats only.
        name: identifies the collective on all ranks; numbered (eager) or derived from where the call stands
            (inside `tf.function`) by default.
        process_set: the ranks that take part; all by default.
        ignore_name_scope: accepted for Horovod's signature; names here never contain name scopes.

    Returns:
        A tensor of the same shape and dtype, or IndexedSlices.

    Raises:
        TfdistError: an operation that the dtype doesn't have (the average of integers, the sum of bools).
        CollectiveMismatchError: ranks differ in shape, dtype or operation; says which rank sent what.
        CollectiveTimeoutError: a rank did not call within the world's timeout; names it.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.allreduce(tf.constant([1.0, 2.0]), op=tfdist.Sum).numpy().tolist()
        [1.0, 2.0]

    Reference:
        Patarasu, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
        _kind="allreduce",
    )[0]


@uncompiled
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    _kind: str = "grouped_allreduce",
) -> list[Any]:
    """Combines several tensors over all ranks as one operation: agreed once, packed, in flight together.

    Who calls, bytes, gradient, arguments and errors are those of `allreduce`; dtypes may be mixed, and dense
    tensors and IndexedSlices too.

    Args:
        tensors: tensors, variables or IndexedSlices, equal in number and order on all ranks.
        average: see `allreduce`.
        device_dense: see `allreduce`.
        device_sparse: see `allreduce`.
        compression: see `allreduce`.
        op: see `allreduce`.
        prescale_factor: see `allreduce`.
        postscale_factor: see `allreduce`.
        process_set: see `allreduce`.
        ignore_name_scope: see `allreduce`.
        name: see `allreduce`.

    Returns:
        One result per tensor, in order.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> [t.numpy().item() for t in tfdist.grouped_allreduce([tf.constant(1.0), tf.constant(2.0)])]
        [1.0, 2.0]
    """
    chosen = resolve_op(op, average)
    results: list[Any] = list(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if dense:
        with _on_device(device_dense):
            inputs = [tf.convert_to_tensor(tensors[i]) for i in dense]
            for tensor in inputs:
                check_dtype(_kind, chosen, tensor.dtype)
                _check_factors(_kind, tensor.dtype, prescale_factor, postscale_factor)
            pairs = [compression.compress(_scale(tensor, prescale_factor)) for tensor in inputs]
            reduced = _reduce([tensor for tensor, _ in pairs], chosen, name, process_set, _kind)
            for i, tensor, (_, context) in zip(dense, reduced, pairs, strict=True):
                results[i] = _scale(compression.decompress(tensor, context), postscale_factor)
    for i in sparse:
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise TfdistError(
                f"{_kind} of IndexedSlices takes no scale factors; received {prescale_factor} and "
                f"{postscale_factor}. Multiply the values yourself."
            )
        part = name if name is None or len(tensors) == 1 else f"{name}.{i}"
        with _on_device(device_sparse):
            results[i] = _gather_slices(tensors[i], chosen, part, process_set, compression)
    return results


@uncompiled
def reduce(
    tensor: Any,
    root_rank: int = 0,
    op: ReduceOp | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines a tensor over all ranks for one of them; the others get zeros.

    Who calls: every rank of `process_set`, with the same shape, dtype, operation and root.
    Bytes: those of `allreduce`, 2(N-1)/N·K per rank; neither engine has a cheaper operation.
    Gradient: the root's upstream gradient, broadcast (divided by N for Average).

    Args:
        tensor: as for `allreduce`, without IndexedSlices.
        root_rank: world rank that gets the result.
        op: as for `allreduce`; Average by default.
        name: as for `allreduce`.
        process_set: the ranks that take part; all by default.

    Returns:
        On the root the combined tensor, elsewhere zeros of the same shape and dtype.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.reduce(tf.constant(3), op=tfdist.Sum).numpy().item()
        3
    """
    chosen = resolve_op(op, None)
    value = tf.convert_to_tensor(tensor)
    check_dtype("reduce", chosen, value.dtype)
    check_root("reduce", root_rank, process_set)
    [result] = _reduce([value], chosen, name, process_set, "reduce", root=root_rank)
    return result


@uncompiled
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combines a tensor over all ranks and gives each rank a share of the rows.

    Who calls: every rank of `process_set`, with the same shape, dtype and operation.
    Bytes: each rank sends and receives (N-1)/N·K.
    Gradient: the upstream gradients of all ranks, gathered (divided by N for Average); Sum and Average only.

    Args:
        tensor: at least one axis; dtypes as for `allreduce`.
        device_dense: as for `allreduce`.
        compression: as for `allreduce`.
        op: as for `allreduce`; Average by default.
        name: as for `allreduce`.
        process_set: the ranks that take part; all by default.
        ignore_name_scope: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        This rank's rows: equal shares in the order of ranks, the first ranks one more where it doesn't divide.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.reducescatter(tf.constant([1.0, 2.0]), op=tfdist.Sum).numpy().tolist()
        [1.0, 2.0]
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        ignore_name_scope,
        name,
        prescale_factor,
        postscale_factor,
    )[0]


@uncompiled
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of several tensors, agreed on once; see there.

    Args:
        tensors: equal in number and order on all ranks.
        device_dense: see `reducescatter`.
        compression: see `reducescatter`.
        op: see `reducescatter`.
        process_set: see `reducescatter`.
        ignore_name_scope: see `reducescatter`.
        name: see `reducescatter`.
        prescale_factor: see `reducescatter`.
        postscale_factor: see `reducescatter`.

    Returns:
        This rank's rows of each tensor.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> len(tfdist.grouped_reducescatter([tf.ones([2]), tf.ones([3])]))
        2
    """
    chosen = resolve_op(op, None)
    with _on_device(device_dense):
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        for tensor in inputs:
            check_dtype("reducescatter", chosen, tensor.dtype)
            _check_factors("reducescatter", tensor.dtype, prescale_factor, postscale_factor)
            check_rows("reducescatter", tensor)
        if not inputs:
            return []
        pairs = [compression.compress(_scale(tensor, prescale_factor)) for tensor in inputs]
        scattered = _scatter([tensor for tensor, _ in pairs], chosen, name, process_set)
        return [
            _scale(compression.decompress(tensor, context), postscale_factor)
            for tensor, (_, context) in zip(scattered, pairs, strict=True)
        ]


def resolve_op(op: Any, average: bool | None) -> ReduceOp:
    """The operation that `op` and Horovod's old `average` ask for."""
    if op is not None and average is not None:
        raise TfdistError(
            f"Give op= or average=, not both; received op={op} and average={average}. `average` is "
            "Horovod's old form."
        )
    if average is not None:
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise TfdistError(
            f"op must be tfdist.Average, Sum, Min, Max, Product, LogicalAnd, LogicalOr or Adasum; received {op!r}."
        )
    return op


def check_dtype(kind: str, op: ReduceOp, dtype: Any) -> None:
    """Raises if the operation makes no sense for a dtype or can't run here."""
    if op in _LOGICAL:
        allowed: tuple[str, ...] = ("bool", *_INTEGERS)
        fix = "Compare first, such as `tensor > 0`."
    elif op in (Average, Adasum):
        allowed = _FLOATS
        fix = "Cast to a float, or use op=tfdist.Sum." if op is Average else "Cast to a float."
    else:
        allowed = tuple(name for name in (*_FLOATS, *_INTEGERS) if name != "uint64")
        fix = "Use tfdist.LogicalAnd or tfdist.LogicalOr." if dtype == tf.bool else "Cast first."
    if dtype.name not in allowed:
        raise TfdistError(f"{kind} with {op.value} takes {', '.join(allowed)}; received {dtype.name}. {fix}")
    engine = world.current().engine
    if op is Adasum and op not in engine.native_ops:
        raise BackendUnavailableError(
            f"Adasum runs on the Horovod engine only; this world uses {engine.name!r}. Use op=tfdist.Average, or "
            '`tfdist.init(backend="horovod")`.'
        )


def check_root(kind: str, root_rank: Any, process_set: ProcessSet) -> None:
    """Raises unless the root is a world rank in the process set."""
    ranks = process_set.ranks
    if not isinstance(root_rank, int) or isinstance(root_rank, bool) or root_rank not in ranks:
        raise TfdistError(
            f"{kind}: root_rank must be one of the ranks {list(ranks)}; received {root_rank!r}."
        )


def check_rows(kind: str, tensor: Any) -> None:
    """Raises unless a tensor has a first axis."""
    if tensor.shape.rank is None or tensor.shape.rank == 0:
        raise TfdistError(
            f"{kind} works along axis 0, so the number of axes must be known and at least 1; received shape "
            f"{tensor.shape}. Reshape it, such as `tf.reshape(tensor, [1])`."
        )


def _reduce(
    tensors: Sequence[Any],
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
    kind: str,
    *,
    root: int | None = None,
) -> list[Any]:
    """All-reduce with its gradient; with a root, zeros elsewhere."""
    suffix = "" if root is None else f" root {root}"
    call = begin(kind, name, process_set, signature=f"{op.value} {describe(tensors)}{suffix}")
    here = root is None or world.rank() == root

    def backward(upstream: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        if op in (Min, Max):
            return _extreme_gradient(upstream, inputs, outputs, call, process_set, root)
        if op not in (Sum, Average):
            raise TfdistError(f"{kind} with {op.value} has no gradient. Use Sum, Average, Min or Max.")
        if root is None:
            return _reduce(upstream, op, call.gradient, process_set, kind)
        from tfdist.operations.movement import grouped_broadcast

        shared = grouped_broadcast(upstream, root, name=call.gradient, process_set=process_set)
        return [_scale(tensor, 1 / call.group.size) for tensor in shared] if op is Average else shared

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(*inputs: Any) -> Any:
        outputs = run_engine(call, inputs, lambda sent: _combine(sent, op, call.name, call.group))
        results = outputs if here else [tf.zeros_like(output) for output in outputs]
        return results, lambda *upstream: differentiate(inputs, upstream, outputs, backward)

    return list(run(*tensors))


def differentiate(
    inputs: Sequence[Any], upstream: Sequence[Any], outputs: Sequence[Any], backward: Callable[..., list[Any]]
) -> list[Any]:
    """Calls `backward` for the floating tensors only; the others have no gradient."""
    places = [i for i, tensor in enumerate(inputs) if tensor.dtype.is_floating]
    results: list[Any] = [None] * len(inputs)
    if places:
        given = [tf.convert_to_tensor(upstream[i]) for i in places]
        found = backward(given, [inputs[i] for i in places], [outputs[i] for i in places])
        for i, result in zip(places, found, strict=True):
            results[i] = result
    return results


def _combine(tensors: Sequence[Any], op: ReduceOp, name: str, group: Group) -> list[Any]:
    """The engine's all-reduce for operations and dtypes it may not have itself."""
    engine = world.current().engine
    sent = [_prepare(tensor, op, engine.native_dtypes) for tensor in tensors]
    received = engine.allreduce(sent, _native(op), name=name, group=group)
    return [
        _finish(result, op, tensor.dtype, group) for result, tensor in zip(received, tensors, strict=True)
    ]


def _native(op: ReduceOp) -> ReduceOp:
    return _LOGICAL.get(op, Sum if op is Average else op)


def _prepare(tensor: Any, op: ReduceOp, native: frozenset[str]) -> Any:
    if op in _LOGICAL:
        return tf.cast(tensor if tensor.dtype == tf.bool else tf.not_equal(tensor, 0), tf.int32)
    if tensor.dtype.name not in native:
        return tf.cast(tensor, _WIDER.get(tensor.dtype.name, tensor.dtype.name))
    return tensor


def _finish(result: Any, op: ReduceOp, dtype: Any, group: Group) -> Any:
    if op is Average:
        result = _scale(result, 1 / group.size)
    return tf.cast(result, dtype) if result.dtype != dtype else result


def _extreme_gradient(
    upstream: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    call: Call,
    process_set: ProcessSet,
    root: int | None,
) -> list[Any]:
    """Gradient of Min and Max: all ranks' upstream, for those who hold the extreme value."""
    holds = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(inputs, outputs, strict=True)]
    if root is not None and world.rank() != root:
        upstream = [tf.zeros_like(gradient) for gradient in upstream]
    summed = _reduce([*upstream, *holds], Sum, call.gradient, process_set, "allreduce")
    totals, ties = summed[: len(holds)], summed[len(holds) :]
    return [total * hold / tie for total, hold, tie in zip(totals, holds, ties, strict=True)]


def _scatter(tensors: Sequence[Any], op: ReduceOp, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Reduce-scatter with its gradient."""
    call = begin("reducescatter", name, process_set, signature=f"{op.value} {describe(tensors)}")
    engine = world.current().engine
    position = call.group.position(world.rank())

    def backward(upstream: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        from tfdist.operations.movement import grouped_allgather

        if op not in (Sum, Average):
            raise TfdistError(f"reducescatter with {op.value} has no gradient. Use Sum or Average.")
        gathered = grouped_allgather(upstream, name=call.gradient, process_set=process_set)
        gathered = [tf.ensure_shape(g, x.shape) for g, x in zip(gathered, inputs, strict=True)]
        return [_scale(tensor, 1 / call.group.size) for tensor in gathered] if op is Average else gathered

    def scatter(inputs: Sequence[Any]) -> list[Any]:
        outputs = []
        for i, tensor in enumerate(inputs):
            sent = _prepare(tensor, op, engine.native_dtypes)
            part = engine.reducescatter(sent, _native(op), name=f"{call.name}.{i}", group=call.group)
            if tensor.shape[0] is not None:
                rows = split_rows(tensor.shape[0], call.group.size)[position]
                part = tf.ensure_shape(part, [rows, *tensor.shape[1:]])
            outputs.append(_finish(part, op, tensor.dtype, call.group))
        return outputs

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(*inputs: Any) -> Any:
        outputs = run_engine(call, inputs, scatter)
        return outputs, lambda *upstream: differentiate(inputs, upstream, outputs, backward)

    return list(run(*tensors))


def _gather_slices(
    slices: tf.IndexedSlices, op: ReduceOp, name: str | None, process_set: ProcessSet, compression: Any
) -> tf.IndexedSlices:
    """Sparse all-reduce: the rows of all ranks, whose duplicates mean a sum."""
    from tfdist.operations.movement import grouped_allgather

    if op not in (Sum, Average):
        raise TfdistError(
            f"allreduce of IndexedSlices takes Sum and Average; received {op.value}. Convert it with "
            "`tf.convert_to_tensor` first."
        )
    values = tf.convert_to_tensor(slices.values)
    check_dtype("allreduce", op, values.dtype)
    sent, context = compression.compress(values)
    values, indices = grouped_allgather([sent, slices.indices], name=name, process_set=process_set)
    values = compression.decompress(values, context)
    if op is Average:
        values = _scale(values, 1 / len(process_set.ranks))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _scale(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def _check_factors(kind: str, dtype: Any, before: float, after: float) -> None:
    if (before != 1.0 or after != 1.0) and not dtype.is_floating:
        raise TfdistError(
            f"{kind}: prescale_factor and postscale_factor apply to floats; received {before} and {after} for "
            f"{dtype.name}. Cast to a float first."
        )


def _on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    context: contextlib.AbstractContextManager[Any] = (
        tf.device(device) if device else contextlib.nullcontext()
    )
    return context
