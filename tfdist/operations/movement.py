"""Collectives that move tensors without combining them: `allgather`, `broadcast`, `alltoall`, `barrier`.

All numeric dtypes and bool travel as their bits, so NaNs and signed zeros arrive as they left. Gradients are
the mathematical adjoints, as explained in `reductions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import world
from tfdist.errors import TfdistError
from tfdist.operations.agreement import begin, describe_shape, run_engine, uncompiled
from tfdist.operations.reductions import (
    Sum,
    allreduce,
    check_root,
    check_rows,
    differentiate,
    grouped_allreduce,
)
from tfdist.process_sets import ProcessSet, global_process_set


@uncompiled
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates the tensors of all ranks along axis 0.

    Who calls: every rank of `process_set`, with the same dtype and axes after the first; the first may differ
    and be 0.
    Bytes: each rank sends (N-1) times its rows (tf engine: times the rows of the rank with most, rounded up by
    at most an eighth).
    Gradient: the sum over ranks of the upstream gradients of this rank's rows.

    Args:
        tensor: at least one axis, any numeric dtype or bool.
        name: as for `allreduce`.
        ignore_name_scope: accepted for Horovod's signature.
        process_set: the ranks that take part; all by default.

    Returns:
        The rows of all ranks, in the order of ranks.

    Raises:
        CollectiveMismatchError: ranks differ in dtype or in the axes after the first.
        CollectiveTimeoutError: a rank did not call; names it.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.allgather(tf.constant([1, 2])).numpy().tolist()
        [1, 2]
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@uncompiled
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors, agreed on once; see there.

    Args:
        tensors: equal in number and order on all ranks.
        name: as for `allreduce`.
        ignore_name_scope: accepted for Horovod's signature.
        process_set: the ranks that take part; all by default.

    Returns:
        One result per tensor.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> [t.shape[0] for t in tfdist.grouped_allgather([tf.ones([2]), tf.ones([3])])]
        [2, 3]
    """
    values = [_movable("allgather", tensor) for tensor in tensors]
    if not values:
        return []
    for value in values:
        check_rows("allgather", value)
    signature = ", ".join(f"rows of {value.dtype.name}{describe_shape(value.shape[1:])}" for value in values)
    own = [value.shape[0] for value in values]
    call = begin("allgather", name, process_set, signature=signature, payload=own)
    lengths: list[list[int] | None] = [None] * len(values)
    if call.payloads is not None:
        lengths = [list(of_tensor) for of_tensor in zip(*call.payloads, strict=True)]
    engine = world.current().engine

    def backward(upstream: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        rows = tf.stack([tf.shape(x)[0] for x in inputs])
        every = allgather(rows[tf.newaxis], _then(call.gradient, "rows"), process_set=process_set)
        results = []
        for i, (gradient, x) in enumerate(zip(upstream, inputs, strict=True)):
            received, _ = alltoall(
                gradient, every[:, i], _then(call.gradient, str(i)), process_set=process_set
            )
            blocks = tf.reshape(received, tf.concat([[call.group.size], tf.shape(x)], 0))
            results.append(tf.ensure_shape(tf.reduce_sum(blocks, 0), x.shape))
        return results

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(*inputs: Any) -> Any:
        outputs = run_engine(
            call,
            inputs,
            lambda sent: [
                engine.allgather(x, name=f"{call.name}.{i}", group=call.group, lengths=lengths[i])
                for i, x in enumerate(sent)
            ],
        )
        return outputs, lambda *upstream: differentiate(inputs, upstream, outputs, backward)

    return list(run(*values))


@uncompiled
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's tensor.

    Who calls: every rank of `process_set`, with the same shape, dtype and root.
    Bytes: every rank but the root receives K; a rank sends at most 2·K (tf engine, a binary tree), the root
    at most log2(N)·K (Horovod with Gloo).
    Gradient: on the root the sum of all ranks' upstream gradients, elsewhere zeros.

    Args:
        tensor: any shape, any numeric dtype or bool; its values matter on the root only.
        root_rank: world rank whose tensor all get.
        name: as for `allreduce`.
        ignore_name_scope: accepted for Horovod's signature.
        process_set: the ranks that take part; all by default.

    Returns:
        The root's tensor.

    Raises:
        CollectiveMismatchError: ranks differ in shape, dtype or root.
        CollectiveTimeoutError: a rank did not call; names it.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.broadcast(tf.constant([1, 2]), root_rank=0).numpy().tolist()
        [1, 2]
    """
    return grouped_broadcast([tensor], root_rank, name=name, process_set=process_set)[0]


@uncompiled
def grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`broadcast` of several tensors of any dtypes, agreed on once and packed; see there.

    Args:
        tensors: equal in number and order on all ranks.
        root_rank: world rank whose tensors all get.
        name: as for `allreduce`.
        process_set: the ranks that take part; all by default.

    Returns:
        The root's tensors.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> from tfdist.operations import grouped_broadcast
        >>> len(grouped_broadcast([tf.ones([2]), tf.constant(True)], 0))
        2
    """
    values = [_movable("broadcast", tensor) for tensor in tensors]
    check_root("broadcast", root_rank, process_set)
    if not values:
        return []
    signature = ", ".join(f"{value.dtype.name}{describe_shape(value.shape)}" for value in values)
    call = begin("broadcast", name, process_set, signature=f"{signature} root {root_rank}")
    engine = world.current().engine

    def backward(upstream: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        summed = grouped_allreduce(upstream, op=Sum, name=call.gradient, process_set=process_set)
        return summed if world.rank() == root_rank else [tf.zeros_like(tensor) for tensor in summed]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(*inputs: Any) -> Any:
        outputs = run_engine(
            call, inputs, lambda sent: engine.broadcast(sent, root_rank, name=call.name, group=call.group)
        )
        return outputs, lambda *upstream: differentiate(inputs, upstream, outputs, backward)

    return list(run(*values))


@uncompiled
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows to every rank and returns those that every rank sent here.

    Who calls: every rank of `process_set`, with the same dtype and axes after the first.
    Bytes: each rank sends the rows it doesn't keep (tf engine: N-1 blocks as long as the longest of all,
    rounded up by at most an eighth).
    Gradient: the upstream gradients, sent back.

    Args:
        tensor: rows along axis 0, any numeric dtype or bool.
        splits: integers `[ranks]`: how many rows each rank gets, in the order of ranks; equal shares by
            default.
        name: as for `allreduce`.
        ignore_name_scope: accepted for Horovod's signature.
        process_set: the ranks that take part; all by default.

    Returns:
        The received rows in the order of ranks; with `splits` a pair of them and of how many came from each
        rank (int32 `[ranks]`).

    Raises:
        TfdistError: the splits don't add up to the number of rows, or the rows don't divide.
        CollectiveMismatchError: ranks differ in dtype or in the axes after the first.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> tfdist.alltoall(tf.constant([1, 2])).numpy().tolist()
        [1, 2]
    """
    value = _movable("alltoall", tensor)
    check_rows("alltoall", value)
    ranks = len(process_set.ranks)
    counts = _splits_of(value, splits, ranks)
    tail = describe_shape(value.shape[1:])
    call = begin("alltoall", name, process_set, signature=f"rows of {value.dtype.name}{tail}")
    engine = world.current().engine

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(rows: Any, sizes: Any) -> Any:
        received, sources = run_engine(
            call,
            [rows, sizes],
            lambda sent: engine.alltoall(sent[0], sent[1], name=call.name, group=call.group),
        )

        def gradient(upstream: Any, _: Any) -> Any:
            if not rows.dtype.is_floating:
                return None, None
            back, _ = alltoall(upstream, sources, call.gradient, process_set=process_set)
            return tf.ensure_shape(back, rows.shape), None

        return (received, sources), gradient

    received, sources = run(value, counts)
    return received if splits is None else (received, sources)


@uncompiled
def barrier(name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Waits until every rank of `process_set` is here.

    Who calls: every rank of `process_set`. Bytes: a few over the control channel; inside `tf.function`, where
    it runs in order with the function's other side effects, those of a one-element `allreduce`.

    Args:
        name: as for `allreduce`.
        process_set: the ranks that wait for each other; all by default.

    Returns:
        None eagerly, inside `tf.function` an operation.

    Raises:
        CollectiveTimeoutError: a rank did not come within the world's timeout; names it.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.barrier()
    """
    if tf.executing_eagerly():
        begin("barrier", name, process_set, signature="")
        return None
    arrived = allreduce(tf.ones([1]), op=Sum, name=name or "barrier", process_set=process_set)
    with tf.control_dependencies([arrived]):
        return tf.no_op()


def _movable(kind: str, tensor: Any) -> Any:
    value = tf.convert_to_tensor(tensor)
    if value.dtype in (tf.string, tf.resource, tf.variant) or value.dtype.is_quantized:
        raise TfdistError(
            f"{kind} moves numbers and bools; received {value.dtype.name}. For strings and other objects use "
            "tfdist.broadcast_object or tfdist.allgather_object."
        )
    return value


def _splits_of(value: Any, splits: Any, ranks: int) -> Any:
    rows = value.shape[0]
    if splits is None:
        if rows is not None and rows % ranks:
            raise TfdistError(
                f"alltoall without splits needs a number of rows that {ranks} ranks divide; received {rows} on "
                f"rank {world.rank()}. Pass splits."
            )
        total = tf.shape(value)[0]
        return tf.fill([ranks], total // ranks)
    counts = tf.cast(tf.convert_to_tensor(splits), tf.int32)
    if counts.shape.rank != 1 or counts.shape[0] not in (None, ranks):
        raise TfdistError(
            f"alltoall: splits must be {ranks} integers, one per rank; received shape {counts.shape} on rank "
            f"{world.rank()}."
        )
    if tf.executing_eagerly():
        listed = counts.numpy().tolist()
        if min(listed) < 0 or sum(listed) != rows:
            raise TfdistError(
                f"alltoall: splits must be at least 0 and add up to the number of rows, {rows}; received {listed} "
                f"on rank {world.rank()}."
            )
    return tf.ensure_shape(counts, [ranks])


def _then(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
