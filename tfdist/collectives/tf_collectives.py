"""The `tf` engine: TensorFlow's own collective ops in plain processes, with nothing to install or compile.

Problem: TensorFlow's collectives are built for its distribution strategies. Outside of one they have no keys,
no gradients, few dtypes and fixed shapes, move one tensor per op, and a large tensor in a single piece: the
network idles while the CPU adds, and the other way round (64 MB at 2 ranks: 270 to 400 ms).

Solution: keys from the control channel (`tf_keys`), bits instead of dtypes for everything that only moves
(`tf_words`), small tensors packed into buckets, and up to `PARTS_IN_FLIGHT` parts of every reduction under
way at once (the same 64 MB: about 100 ms), which the op can do itself when asked (`max_subdivs_per_device`):
no splitting or concatenating of large tensors here.

Bytes that each rank sends, for K bytes and N ranks: all-reduce 2(N-1)/N·K, reduce-scatter (N-1)/N·K,
all-gather (N-1)·K, all-to-all (N-1)/N·K, broadcast at most 2·K (a binary tree).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.cluster import ClusterSpec
from tfdist.collectives import tf_server
from tfdist.collectives.base import Engine, Group, ReduceOp, split_rows
from tfdist.collectives.sink import Sink
from tfdist.collectives.tf_keys import CollectiveKeys
from tfdist.collectives.tf_words import (
    SIZE_CLASSES,
    count_words,
    from_words,
    pad,
    plan_buckets,
    size_class,
    static_size,
    to_words,
)

if TYPE_CHECKING:
    from tfdist.control import ControlPlane

_MERGE = {ReduceOp.SUM: "Add", ReduceOp.MIN: "Min", ReduceOp.MAX: "Max", ReduceOp.PRODUCT: "Mul"}
PARTS_IN_FLIGHT = 8  # measured at 2 and 4 ranks: 4 to 16 are equal within noise; 1 takes 2 to 3 times as long
_BUCKET_BYTES = 4 * 2**20  # a copy into a bucket of this size costs less than the latency of another op
SIZES_DIFFER = "tfdist: ranks passed different sizes to"


def _in_a_frame_of_its_own(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has a collective in the body of a loop meet the same one outside of loops, or in another turn.

    TensorFlow tells collectives apart by their key and the turn of the loop that they run in. A rank that has run
    out of data in the middle of `steps_per_execution` joins the others' steps from outside of the loop. A function
    that is not inlined counts its turns anew.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not _is_in_loop():
            return method(self, *args, **options)
        run = tf.function(
            lambda: method(self, *args, **options),
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        return run()

    return call


def _is_in_loop() -> bool:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


class TfCollectives(Engine):
    """Collectives over TensorFlow's gRPC servers, or NCCL where all ranks have a GPU."""

    name = "tf"
    native_ops = frozenset(_MERGE)
    native_dtypes = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64"})

    def __init__(
        self, spec: ClusterSpec, control: ControlPlane, *, timeout: float, nccl: bool = False
    ) -> None:
        """Engine of a world whose server `tf_server.configure_server` has set up.

        Args:
            spec: place of this process.
            control: connected to all ranks.
            timeout: bound in seconds of the start.
            nccl: whether TensorFlow has NCCL and every rank a GPU.
        """
        self._spec = spec
        self._control = control
        self._timeout = timeout
        self._nccl = nccl
        self._device = "/device:GPU:0" if nccl else "/device:CPU:0"
        self._keys = CollectiveKeys(control)
        self._sink = Sink()
        self._lock = threading.Lock()
        self._started = False
        self._aborted: Exception | None = None

    def start(self) -> None:
        """Initialises TensorFlow's context and waits for the peers' servers."""
        if self._aborted is not None:
            raise self._aborted
        with self._lock:
            if self._started:
                return
            from tensorflow.python.eager import context

            context.context().ensure_initialized()
            self._control.exchange("tf engine up", self._spec.rank, timeout=self._timeout)
            self._started = True

    def stop(self) -> None:
        """Nothing to end: TensorFlow can't stop a server, it ends with the process."""

    def abort(self, error: Exception) -> None:
        """Makes all collectives of this process fail; TensorFlow keeps no way back from there."""
        self._aborted = error
        if tf_server.context_exists():
            from tensorflow.python.eager import context

            # On one line, because TensorFlow logs it, too, and `tfdist run` hides that line as a repetition.
            context.context().abort_collective_ops(tf.errors.UNAVAILABLE, " ".join(str(error).split()))

    @_in_a_frame_of_its_own
    def allreduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, *, name: str, group: Group, mean: bool = False
    ) -> list[tf.Tensor]:
        """Ring all-reduce of buckets by dtype."""
        results: list[Any] = list(tensors)
        if group.size == 1:
            return results
        self.start()
        fixed: dict[Any, list[int]] = {}
        for place, tensor in enumerate(tensors):
            size = static_size(tensor)
            if size is None:
                results[place] = self._reduce_any_size(
                    tensor, op, name=f"{name}.{place}", group=group, mean=mean
                )
            elif size > 0:
                fixed.setdefault(tensor.dtype, []).append(place)
        for dtype, places in fixed.items():
            sizes = [static_size(tensors[place]) or 0 for place in places]
            for number, bucket in enumerate(plan_buckets(sizes, _BUCKET_BYTES // dtype.size)):
                members = [places[i] for i in bucket]
                merged = self._reduce_bucket(
                    [tensors[place] for place in members],
                    op,
                    name=f"{name} {dtype.name} {number}",
                    group=group,
                    mean=mean,
                )
                for place, result in zip(members, merged, strict=True):
                    results[place] = result
        return results

    @_in_a_frame_of_its_own
    def allgather(
        self, tensor: tf.Tensor, *, name: str, group: Group, lengths: Sequence[int] | None = None
    ) -> tf.Tensor:
        """Ring all-gather of buffers that are as long as the longest."""
        if group.size == 1:
            return tensor
        self.start()
        static = tensor.shape.as_list()
        row = _row_elements(tensor)
        each: Any = list(lengths) if lengths is not None else None
        if each is None:
            own = tf.shape(tensor, out_type=tf.int64)[:1]
            each = tf.unstack(self._gather(own, f"{name} lengths", group), num=group.size)
        elements = [length * row for length in each]
        words = [count_words(count, tensor.dtype) for count in elements]
        longest = max(words) if _known(words) else tf.reduce_max(tf.stack(words))
        number, size = size_class(longest)
        gathered = self._gather(pad(to_words(tensor), size), f"{name} data", group, number=number, size=size)
        buffers = tf.reshape(gathered, [group.size, size])
        pieces = [
            from_words(buffers[place, : words[place]], tensor.dtype, elements[place])
            for place in range(group.size)
        ]
        result = tf.reshape(tf.concat(pieces, 0), _join_shape(sum(each), tensor))
        result.set_shape([sum(each) if _known(each) else None, *static[1:]])
        return result

    @_in_a_frame_of_its_own
    def broadcast(
        self, tensors: Sequence[tf.Tensor], root: int, *, name: str, group: Group
    ) -> list[tf.Tensor]:
        """Tree broadcast of buckets of mixed dtypes."""
        results: list[Any] = list(tensors)
        if group.size == 1:
            return results
        self.start()
        fixed = []
        for place, tensor in enumerate(tensors):
            size = static_size(tensor)
            if size is None:
                results[place] = self._broadcast_any_size(tensor, root, name=f"{name}.{place}", group=group)
            elif size > 0:
                fixed.append(place)
        sizes = [int(count_words(static_size(tensors[place]), tensors[place].dtype)) for place in fixed]
        for number, bucket in enumerate(plan_buckets(sizes, _BUCKET_BYTES // 4)):
            words = [to_words(tensors[fixed[i]]) for i in bucket]
            total = sum(sizes[i] for i in bucket)
            packed = words[0] if len(words) == 1 else tf.concat(words, 0)
            key = self._keys.instance(group, f"broadcast {name} {number} root {root} {total}")
            received = self._send_or_receive(packed, total, key, root, group)
            parts = tf.split(received, [sizes[i] for i in bucket])
            for i, part in zip(bucket, parts, strict=True):
                tensor = tensors[fixed[i]]
                flat = from_words(part, tensor.dtype, static_size(tensor))
                results[fixed[i]] = tf.reshape(flat, tensor.shape)
        return results

    @_in_a_frame_of_its_own
    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, *, name: str, group: Group
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """All-to-all of blocks that are as long as the longest."""
        if group.size == 1:
            return tensor, splits
        self.start()
        row = _row_elements(tensor)
        matrix = tf.reshape(self._gather(splits, f"{name} splits", group), [group.size, group.size])
        received = matrix[:, group.position(self._spec.rank)]
        longest = count_words(tf.cast(tf.reduce_max(matrix), tf.int64) * row, tensor.dtype)
        number, size = size_class(longest)
        blocks = [pad(to_words(part), size) for part in tf.split(tensor, splits, num=group.size)]
        key = self._keys.instance(group, f"alltoall {name}", count=SIZE_CLASSES) + number
        exchanged = self._exchange_blocks(tf.stack(blocks), key, f"alltoall {name} {group.ranks}", group)
        counts = [tf.cast(count, tf.int64) * row for count in tf.unstack(received, num=group.size)]
        pieces = [
            from_words(exchanged[place, : count_words(count, tensor.dtype)], tensor.dtype, count)
            for place, count in enumerate(counts)
        ]
        rows = tf.cast(tf.reduce_sum(received), tf.int64)
        result = tf.reshape(tf.concat(pieces, 0), _join_shape(rows, tensor))
        result.set_shape([None, *tensor.shape.as_list()[1:]])
        return result, received

    @_in_a_frame_of_its_own
    def reducescatter(self, tensor: tf.Tensor, op: ReduceOp, *, name: str, group: Group) -> tf.Tensor:
        """All-to-all of equal blocks, then a local reduction: TensorFlow has no reduce-scatter on CPU."""
        if group.size == 1:
            return tensor
        self.start()
        row = _row_elements(tensor)
        position = group.position(self._spec.rank)
        rows: Any = tensor.shape[0]
        signature = f"reducescatter {name} {op.value} {tensor.dtype.name}"
        if rows is None or not isinstance(row, int):
            rows = self._agreed_size(tf.shape(tensor, out_type=tf.int64)[0], name=name, group=group)
            counts = [
                rows // group.size + tf.cast(i < rows % group.size, tf.int64) for i in range(group.size)
            ]
            number, size = size_class(tf.convert_to_tensor(counts[0] * row))
            key = self._keys.instance(group, signature, count=SIZE_CLASSES) + number
        else:
            counts = split_rows(rows, group.size)
            size = max(1, counts[0] * row)
            key = self._keys.instance(group, f"{signature} {size}")
        parts = tf.split(tensor, counts, num=group.size)
        flat = [tf.reshape(part, [count * row]) for part, count in zip(parts, counts, strict=True)]
        blocks = tf.stack([pad(part, size) for part in flat])
        exchanged = self._exchange_blocks(blocks, key, f"{signature} {group.ranks}", group)
        merged = _REDUCE[op](exchanged, axis=0)[: counts[position] * row]
        result = tf.reshape(merged, _join_shape(counts[position], tensor))
        result.set_shape([counts[position] if _known(counts) else None, *tensor.shape.as_list()[1:]])
        return result

    @_in_a_frame_of_its_own
    def exchange(
        self,
        outgoing: Sequence[tf.Tensor | None],
        incoming: Sequence[int],
        *,
        name: str,
        group: Group,
        dtype: tf.DType,
        after: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor | None]:
        """Broadcasts among two: TensorFlow has no other way to send to one rank, and its all-to-all pads."""
        self.start()
        here = self._spec.rank
        received: list[Any] = [None] * group.size
        # Executed eagerly, they run one after the other: in the same order on all ranks, or they would lock.
        for source in group.ranks:
            for target in group.ranks:
                place = group.position(target if source == here else source)
                if source == target or here not in (source, target):
                    continue
                sent = outgoing[place] if source == here else None
                size = incoming[place] if target == here else static_size(sent) if sent is not None else 0
                if not size:
                    continue
                pair = Group(tuple(sorted((source, target))))
                words = int(count_words(size, dtype))
                key = self._keys.instance(pair, f"exchange {name} {dtype.name} {source} {words}")
                with tf.control_dependencies(list(after)):
                    result = self._send_or_receive(
                        None if sent is None else to_words(sent), words, key, source, pair
                    )
                if source == here:
                    self._sink.consume([result])
                else:
                    received[place] = tf.ensure_shape(from_words(result, dtype, size), [size])
        return received

    def _reduce_bucket(
        self, tensors: list[Any], op: ReduceOp, *, name: str, group: Group, mean: bool
    ) -> list[Any]:
        # TensorFlow holds the shape against a key, so a scalar and a vector of one would need two: all are flat.
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        packed = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
        signature = f"reduce {name} {op.value}{' mean' * mean} {static_size(packed)}"
        key = self._keys.instance(group, signature)
        merged = self._reduce(packed, op, key, f"{signature} {group.ranks}", group, mean=mean)
        parts = [merged]
        if len(flat) > 1:
            parts = tf.split(merged, [static_size(tensor) for tensor in flat])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _reduce_any_size(
        self, tensor: Any, op: ReduceOp, *, name: str, group: Group, mean: bool = False
    ) -> Any:
        flat = tf.reshape(tensor, [-1])
        total = self._agreed_size(tf.size(flat, out_type=tf.int64), name=name, group=group)
        number, size = size_class(total)
        signature = f"reduce {name} {op.value}{' mean' * mean} {tensor.dtype.name} any size"
        key = self._keys.instance(group, signature, count=SIZE_CLASSES) + number
        merged = self._reduce(pad(flat, size), op, key, f"{signature} {group.ranks}", group, mean=mean)
        return tf.ensure_shape(tf.reshape(merged[:total], tf.shape(tensor)), tensor.shape)

    def _broadcast_any_size(self, tensor: Any, root: int, *, name: str, group: Group) -> Any:
        words = to_words(tensor)
        total = self._agreed_size(tf.size(words, out_type=tf.int64), name=name, group=group)
        number, size = size_class(total)
        key = (
            self._keys.instance(group, f"broadcast {name} root {root} any size", count=SIZE_CLASSES) + number
        )
        received = self._send_or_receive(pad(words, size), size, key, root, group)[:total]
        flat = from_words(received, tensor.dtype, tf.size(tensor, out_type=tf.int64))
        return tf.ensure_shape(tf.reshape(flat, tf.shape(tensor)), tensor.shape)

    def _agreed_size(self, size: Any, *, name: str, group: Group) -> Any:
        """This rank's size once every rank has shown the same: padded buffers would hide a difference."""
        sizes = self._gather(tf.reshape(size, [1]), f"{name} size", group)
        message = f"{SIZES_DIFFER} {name!r}; sizes in order of ranks {list(group.ranks)}:"
        agree = tf.debugging.Assert(tf.reduce_all(tf.equal(sizes, size)), [message, sizes], summarize=-1)
        with tf.control_dependencies([agree] if agree is not None else []):
            return tf.identity(size)

    def _reduce(
        self, tensor: Any, op: ReduceOp, key: Any, order: str, group: Group, *, mean: bool = False
    ) -> Any:
        with tf.device(self._device):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                merge_op=_MERGE[op],
                final_op="Div" if mean else "Id",
                instance_key=key,
                ordering_token=self._token(order),
                communication_hint=self._hint("ring"),
                max_subdivs_per_device=-1 if self._nccl else PARTS_IN_FLIGHT,
                **self._common(group),
            )

    def _gather(self, tensor: Any, name: str, group: Group, *, number: Any = None, size: Any = None) -> Any:
        """All-gather of buffers of equal size: fixed, or that of a size class."""
        if number is None:
            key = self._keys.instance(group, f"gather {name} {tensor.dtype.name} {tensor.shape}")
        elif isinstance(number, tf.Tensor):
            key = self._keys.instance(group, f"gather {name}", count=SIZE_CLASSES) + number
        else:
            key = self._keys.instance(group, f"gather {name} {size}")
        with tf.device(self._device if tensor.dtype.is_floating else "/device:CPU:0"):
            return tf.raw_ops.CollectiveGatherV2(
                input=tensor,
                instance_key=key,
                ordering_token=self._token(f"gather {name} {group.ranks}"),
                communication_hint=self._hint("ring") if tensor.dtype.is_floating else "ring",
                **self._common(group, on_cpu=not tensor.dtype.is_floating),
            )

    def _exchange_blocks(self, blocks: Any, key: Any, order: str, group: Group) -> Any:
        with tf.device(self._device):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=blocks,
                instance_key=key,
                ordering_token=self._token(order),
                communication_hint=self._hint("auto"),
                **self._common(group),
            )

    def _send_or_receive(self, words: Any, size: Any, key: Any, root: int, group: Group) -> Any:
        common = self._common(group) | {"instance_key": key, "communication_hint": self._hint("ring")}
        with tf.device(self._device):
            if self._spec.rank == root:
                return tf.raw_ops.CollectiveBcastSendV2(input=words, **common)
            return tf.raw_ops.CollectiveBcastRecvV2(T=tf.float32, shape=tf.reshape(size, [1]), **common)

    def _common(self, group: Group, *, on_cpu: bool = False) -> dict[str, Any]:
        device = "/device:CPU:0" if on_cpu else self._device
        return {
            "group_size": group.size,
            "group_key": self._keys.group(group, device=device),
            # None: TensorFlow's own bound parks two threads per collective until it passes, 600 of them after
            # 300 small ones. The watchdog bounds the wait instead, and names the ranks that are missing.
            "timeout_seconds": 0.0,
        }

    def _hint(self, on_cpu: str) -> str:
        return "nccl" if self._nccl else on_cpu

    def _token(self, order: str) -> list[Any]:
        # NCCL needs one order of all launches; on CPUs only runs of the same collective must not overtake.
        return self._keys.token("all" if self._nccl else order)


_REDUCE = {
    ReduceOp.SUM: tf.reduce_sum,
    ReduceOp.MIN: tf.reduce_min,
    ReduceOp.MAX: tf.reduce_max,
    ReduceOp.PRODUCT: tf.reduce_prod,
}


def _known(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, tf.Tensor) for value in values)


def _row_elements(tensor: Any) -> Any:
    """Values per row: a number where the static shape tells it, else an int64 scalar tensor."""
    size = tensor.shape[1:].num_elements()
    return int(size) if size is not None else tf.reduce_prod(tf.shape(tensor, out_type=tf.int64)[1:])


def _join_shape(rows: Any, tensor: Any) -> Any:
    """Shape of `rows` rows like those of `tensor`."""
    tail = tensor.shape[1:]
    if tail.is_fully_defined():
        ending = tf.constant(tail.as_list(), tf.int64, shape=[len(tail)])
    else:
        ending = tf.shape(tensor, out_type=tf.int64)[1:]
    return tf.concat([tf.reshape(tf.cast(rows, tf.int64), [1]), ending], 0)
