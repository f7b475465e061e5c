"""The `horovod` engine: Horovod's Gloo, MPI or NCCL operations, under names that don't depend on tracing.

Problem: Horovod identifies a collective by its node's name in the graph, which differs between ranks that
trace differently; it knows fewer dtypes than TensorFlow; and its launcher is the only one that starts a
Gloo build (under mpirun such a build reports size 1 and trains alone, without an error).

Solution: every operation gets the caller's name; dtypes without a kernel travel as bits; and this engine
brings its own rendezvous for Gloo, from the ClusterSpec, so that a Gloo build runs under every launcher. Rank
and size that Horovod reports are compared with the launcher's before anything is trusted.

Bytes that each rank sends, for K bytes and N ranks (Gloo): all-reduce 2(N-1)/N·K, all-gather (N-1)/N of the
result, broadcast at most log2(N)·K (a tree, from the root), all-to-all (N-1)/N·K.

Reference: Horovod 0.28.1, `horovod/tensorflow/mpi_ops.py`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.cluster import ClusterSpec
from tfdist.collectives.base import Engine, Group, ReduceOp
from tfdist.collectives.sink import Sink
from tfdist.errors import BackendUnavailableError

if TYPE_CHECKING:
    from tfdist.collectives.horovod_start import HorovodRuntime

# Same width, same bits: how a dtype travels that Horovod's moving operations don't know.
_CARRIERS = {
    "bfloat16": tf.uint16,
    "uint32": tf.int32,
    "uint64": tf.int64,
    "complex64": tf.int64,
}


_ORDERLY = 1.0  # seconds for Horovod to end with its peers after an abort
_PATIENCE = 5.0  # seconds for it to end at all


class HorovodCollectives(Engine):
    """Collectives of a started Horovod, see `horovod_start.HorovodRuntime`."""

    name = "horovod"
    native_ops = frozenset({ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM})
    native_dtypes = frozenset(
        {"float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8"}
    )

    def __init__(self, spec: ClusterSpec, runtime: HorovodRuntime) -> None:
        """Engine of a started Horovod.

        Args:
            spec: place of this process.
            runtime: Horovod as it was started; ended by `stop`.
        """
        from horovod.tensorflow import mpi_ops

        self._ops = mpi_ops
        self._spec = spec
        self._runtime = runtime
        self._constants = {
            ReduceOp.SUM: mpi_ops.Sum,
            ReduceOp.MIN: mpi_ops.Min,
            ReduceOp.MAX: mpi_ops.Max,
            ReduceOp.PRODUCT: mpi_ops.Product,
            ReduceOp.ADASUM: mpi_ops.Adasum,
        }
        self._unknown: tf.Variable | None = None
        self._sink = Sink()
        self._aborted: Exception | None = None
        self._aborting: threading.Thread | None = None

    def start(self) -> None:
        """Horovod runs already; fails once the engine was aborted."""
        if self._aborted is not None:
            raise self._aborted

    def stop(self) -> None:
        """Ends Horovod; waits until all ranks do."""
        if self._aborting is not None:
            self._aborting.join(_PATIENCE)  # two threads in Horovod's shutdown wait for each other for ever
        elif self._aborted is None:
            self._runtime.stop()

    def abort(self, error: Exception) -> None:
        """Asks Horovod to shut down, which fails everything pending on all ranks."""
        if self._aborted is None:
            self._aborted = error
            self._aborting = threading.Thread(target=self._end, name="tfdist-horovod-abort", daemon=True)
            self._aborting.start()

    def _end(self) -> None:
        # Horovod's shutdown waits for its background thread, which may itself wait for a peer that does not come.
        ending = threading.Thread(target=self._runtime.stop, name="tfdist-horovod-stop", daemon=True)
        ending.start()
        ending.join(_ORDERLY)
        if ending.is_alive():
            self._runtime.break_connections()
            ending.join()

    def register(self, group: Group) -> None:
        """Has Horovod make a process set of these ranks, or use the one it has: it keeps one per ranks."""
        if group.size < self._spec.size:
            self._runtime.add_process_set(group.ranks)

    def forget(self, group: Group) -> None:
        """Removes Horovod's process set where Horovod can; elsewhere it stays, and is used again if needed."""
        self._runtime.remove_process_set(group.ranks)

    def allreduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, *, name: str, group: Group, mean: bool = False
    ) -> list[tf.Tensor]:
        """One grouped all-reduce per dtype, which Horovod fuses and starts together."""
        self.start()
        results: list[Any] = list(tensors)
        sent = [_widen(tensor) for tensor in tensors]
        by_dtype: dict[Any, list[int]] = {}
        for place, tensor in enumerate(sent):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        for dtype, places in by_dtype.items():
            reduced = self._ops._grouped_allreduce(
                [self._kept(sent[places[0]]), *(sent[place] for place in places[1:])],
                name=_node_name(name, dtype.name),
                op=self._constants[op],
                postscale_factor=1.0 / group.size if mean else 1.0,
                **self._common(group),
            )
            for place, result in zip(places, reduced, strict=True):
                original = tensors[place]
                results[place] = tf.cast(result, original.dtype)
                results[place].set_shape(original.shape)
        return results

    def allgather(
        self, tensor: tf.Tensor, *, name: str, group: Group, lengths: Sequence[int] | None = None
    ) -> tf.Tensor:
        """Horovod's all-gather, which agrees on lengths itself."""
        self.start()
        carried, restore = _carry(self._kept(tensor))
        gathered = restore(self._ops.allgather(carried, name=_node_name(name), **self._common(group)))
        gathered.set_shape([sum(lengths) if lengths is not None else None, *tensor.shape.as_list()[1:]])
        return gathered

    def broadcast(
        self, tensors: Sequence[tf.Tensor], root: int, *, name: str, group: Group
    ) -> list[tf.Tensor]:
        """One broadcast per tensor, all in flight together."""
        self.start()
        results = []
        for place, tensor in enumerate(tensors):
            carried, restore = _carry(self._kept(tensor))
            received = self._ops.broadcast(
                carried, root, name=_node_name(name, str(place)), **self._common(group)
            )
            results.append(tf.ensure_shape(restore(received), tensor.shape))
        return results

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, *, name: str, group: Group
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Horovod's all-to-all."""
        self.start()
        carried, restore = _carry(self._kept(tensor))
        received, counts = self._ops.alltoall(
            carried, splits=splits, name=_node_name(name), **self._common(group)
        )
        result = restore(received)
        result.set_shape([None, *tensor.shape.as_list()[1:]])
        counts.set_shape([group.size])
        return result, counts

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
        """Horovod's all-to-all, which sends to each rank only what is for it."""
        sent = [tf.zeros([0], dtype) if each is None else each for each in outgoing]
        with tf.control_dependencies(list(after)):
            packed = tf.identity(self._kept(tf.concat(sent, 0)))
        received, _ = self.alltoall(
            packed,
            tf.constant([int(each.shape[0]) for each in sent], tf.int32),
            name=f"exchange {name} {dtype.name}",
            group=group,
        )
        self._sink.consume([received])
        parts = tf.split(tf.ensure_shape(received, [sum(incoming)]), list(incoming))
        return [part if size else None for part, size in zip(parts, incoming, strict=True)]

    def reducescatter(self, tensor: tf.Tensor, op: ReduceOp, *, name: str, group: Group) -> tf.Tensor:
        """Horovod's reduce-scatter for sums; other operations reduce everywhere and keep this rank's rows."""
        self.start()
        row_shape = tensor.shape.as_list()[1:]
        if op is ReduceOp.SUM and tensor.dtype.name not in ("uint8", "int8"):
            result = self._ops._reducescatter(
                self._kept(_widen(tensor)),
                name=_node_name(name),
                op=self._constants[op],
                **self._common(group),
            )
            result = tf.cast(result, tensor.dtype)
        else:
            [reduced] = self.allreduce([tensor], op, name=name, group=group)
            rows, position = tf.shape(reduced)[0], group.position(self._spec.rank)
            share, rest = rows // group.size, rows % group.size
            begin = position * share + tf.minimum(position, rest)
            result = reduced[begin : begin + share + tf.cast(position < rest, tf.int32)]
        result.set_shape([None, *row_shape])
        return result

    def _kept(self, tensor: Any) -> Any:
        """The same tensor, but in a graph no constant, at no copy.

        Horovod does not declare its operations stateful. Those on constants TensorFlow would run once, while it
        optimizes the graph, and keep the result, while the other ranks wait for the next one.
        """
        if tf.executing_eagerly():
            return tensor
        if self._unknown is None:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                self._unknown = tf.Variable(False, trainable=False, name="unknown")
        ways = tf.raw_ops.Switch(data=tensor, pred=self._unknown.read_value())
        return tf.raw_ops.Merge(inputs=list(ways)).output

    def _common(self, group: Group) -> dict[str, Any]:
        if group.size == self._spec.size:
            process_set = self._ops.global_process_set
        else:
            process_set = self._runtime.process_set(group.ranks)
        if process_set is None:
            raise BackendUnavailableError(
                f"rank {self._spec.rank}: the ranks {list(group.ranks)} are no process set of the Horovod engine. "
                "Create it with `tfdist.add_process_set(ranks)` on every rank of the world."
            )
        return {"process_set": process_set, "ignore_name_scope": True}


def _node_name(*parts: str) -> str:
    """A name that TensorFlow accepts for a node, and of which Horovod, which cuts at slashes, keeps all."""
    return "tfdist." + re.sub(r"[^A-Za-z0-9_.-]", ".", ".".join(parts))


def _widen(tensor: Any) -> Any:
    """Horovod's TensorFlow operations can't add bfloat16; float32 can, at twice the bytes."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _carry(tensor: Any) -> tuple[Any, Any]:
    """The tensor in a dtype that Horovod moves, and the function that turns the result back."""
    original = tensor.dtype
    if original.name == "complex128":
        return tf.bitcast(tensor, tf.float64), lambda moved: tf.bitcast(moved, original)
    carrier = _CARRIERS.get(original.name)
    if carrier is None:
        return tensor, lambda moved: moved
    return tf.bitcast(tensor, carrier), lambda moved: tf.bitcast(moved, original)
