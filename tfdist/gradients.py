"""Combines gradients over ranks: agreement, sparse rows, compression, buckets, averages.

Gradients arrive last layer first, so buckets are filled in that order and each is reduced while earlier
layers still compute theirs (Li et al. 2020, "PyTorch Distributed"). One large bucket would wait for the first
layer; one collective per tensor pays the latency of each.

Sparse gradients (`tf.IndexedSlices`, from embeddings): Keras 3 on TensorFlow does not sum rows that occur
twice before it clips or updates, so Adam, RMSprop, Adagrad and every clipping get them wrong, and gathering
rows from N ranks makes more of them. Duplicates are therefore summed here, at every world size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tfdist import graph_watch, joint_step, world
from tfdist.collectives.base import Group, ReduceOp

DEFAULT_BUCKET_BYTES = 8 << 20
# Tables up to this size travel whole, in the buckets of the dense gradients: cheaper than gathering rows.
SMALL_TABLE_BYTES = 1 << 20

_occurrences: weakref.WeakKeyDictionary[tf.Graph, dict[str, int]] = weakref.WeakKeyDictionary()


class Transport(Protocol):
    """Another way than an all-reduce to sum gradients over the ranks: not every rank gets every sum."""

    def sum_tensors(
        self, tensors: Sequence[Any], variables: Sequence[Any], *, name: str, group: Group
    ) -> list[Any]:
        """Sums of dense gradients; None where this rank gets none."""

    def sum_rows(self, rows: tf.IndexedSlices, variable: Any, *, name: str, group: Group) -> Any:
        """Sum of a sparse gradient, each row once; None where this rank gets none."""


@dataclasses.dataclass
class GradientReducer:
    """Combines one list of gradients per step over the ranks.

    Attributes:
        name: prefix of the collectives' names, equal on all ranks; what is reduced completes it.
        op: `ReduceOp.AVERAGE`, `SUM` or `ADASUM`.
        compression: an object with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`.
        sparse_as_dense: whether to reduce every sparse gradient as a dense one.
        predivide_factor: with AVERAGE, gradients are divided by it before the sum and multiplied by
            factor/size after, against overflow of small floats.
        groups: None for buckets of `bucket_bytes`; a number of buckets; or lists of variables, each list one
            bucket and every other variable one of its own.
        group: ranks to reduce over; None for the whole world.
        device_dense: device for dense collectives, "" for TensorFlow's choice.
        device_sparse: the same for sparse ones.
        local_variables: keys (`id`) of variables that stay local to their rank.
        scale_local: whether local variables' gradients are divided by the number of ranks.
        bucket_bytes: size of a bucket.
        transport: None for all-reduces.
    """

    name: str
    op: ReduceOp = ReduceOp.AVERAGE
    compression: Any = None
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    group: Group | None = None
    device_dense: str = ""
    device_sparse: str = ""
    local_variables: set[int] = dataclasses.field(default_factory=set)
    scale_local: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    transport: Transport | None = None

    # Count reductions set up by this reducer and in this process: a train step without any is found.
    calls: int = 0
    reductions: ClassVar[int] = 0

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], *, weighed_by: Any = None
    ) -> list[Any]:
        """Combines this rank's gradients with those of the other ranks; every rank of the group calls it.

        In a step of `fit()` an average is weighted by the samples of each rank (see `joint_step`).

        Args:
            gradients: dense tensors, `tf.IndexedSlices` or None, the same kinds on every rank.
            variables: what each gradient belongs to; for error messages, groups and local variables.
            weighed_by: this rank's share of the step, a scalar, if `gradients` were multiplied by it already.

        Returns:
            The global gradients in the same order, bit-identical on all ranks; sparse ones without duplicate
            rows. None for those that a `transport` sums elsewhere.
        """
        self.calls += 1
        GradientReducer.reductions += 1
        group = self.group or world.current().everyone
        gradients = [_with_table_shape(g, v) for g, v in zip(gradients, variables, strict=True)]
        signature = _signature(gradients, variables)
        name = _occurrence(_digest(self.name, signature))
        watched = False
        if group.size > 1:
            _agree(self.name, signature, group)
            gradients, watched = graph_watch.enter(name, gradients, group.ranks)
        average = _Average(group, gradients, weighed_by, by_samples=self.op is ReduceOp.AVERAGE)
        reduced = list(gradients)
        dense: list[int] = []
        sparse: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in self.local_variables:
                (gradient,) = average.weigh([gradient])
                reduced[i] = scale(gradient, 1 / group.size) if self.scale_local else gradient
            elif not isinstance(gradient, tf.IndexedSlices):
                dense.append(i)
            elif (
                self.sparse_as_dense
                or self.op is ReduceOp.ADASUM
                or table_bytes(gradient) <= SMALL_TABLE_BYTES
            ):
                reduced[i] = to_dense(gradient)
                dense.append(i)
            else:
                sparse.append(i)
        if group.size > 1 and dense:
            buckets = self._buckets([reduced[i] for i in dense], [variables[i] for i in dense])
            with tf.device(self.device_dense or None):
                for number, bucket in enumerate(buckets):
                    chosen = [dense[i] for i in bucket]
                    values = self._reduce_bucket(
                        [reduced[i] for i in chosen],
                        [variables[i] for i in chosen],
                        f"{name}/bucket{number}",
                        average,
                    )
                    for i, value in zip(chosen, values, strict=True):
                        reduced[i] = value
        for i in sparse:
            with tf.device(self.device_sparse or None):
                rows = sum_duplicate_rows(gradients[i])
                if group.size > 1:
                    rows = self._reduce_rows(rows, variables[i], f"{name}/sparse{i}", average)
                reduced[i] = rows
        return graph_watch.leave(name, reduced) if watched else reduced

    def name_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> str:
        """Name for collectives that go with a reduction of these gradients; unique within a graph."""
        return _occurrence(_digest(f"{self.name} update", _signature(gradients, variables)))

    def _buckets(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
        sizes = [_bytes(gradient) for gradient in gradients]
        if self.groups is None:
            return fill_buckets(sizes, self.bucket_bytes)
        if isinstance(self.groups, int):
            return fill_buckets(sizes, max(1, -(-sum(sizes) // self.groups)))
        group_of = {id(variable): g for g, members in enumerate(self.groups) for variable in members}
        buckets: dict[Any, list[int]] = {}
        for i, variable in enumerate(variables):
            buckets.setdefault(group_of.get(id(variable), ("alone", i)), []).append(i)
        return list(buckets.values())

    def _reduce_bucket(
        self, gradients: Sequence[Any], variables: Sequence[Any], name: str, average: _Average
    ) -> list[Any]:
        """Reduces dense gradients together; those that overwrite their variable combine by maximum."""
        overwrites = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        sums = [i for i, overwrite in enumerate(overwrites) if not overwrite]
        result = list(gradients)
        combined = self._combine([gradients[i] for i in sums], [variables[i] for i in sums], name, average)
        for i, value in zip(sums, combined, strict=True):
            result[i] = value
        # Keras stores float8 scales through "gradients" that replace the variable; the scale of the global
        # batch is the largest of the ranks'.
        peaks = [i for i, overwrite in enumerate(overwrites) if overwrite]
        if peaks:
            engine = world.current().engine
            values = engine.allreduce(
                [gradients[i] for i in peaks], ReduceOp.MAX, name=f"{name}/max", group=average.group
            )
            for i, value in zip(peaks, values, strict=True):
                result[i] = value
        return result

    def _combine(
        self, tensors: Sequence[Any], variables: Sequence[Any], name: str, average: _Average
    ) -> list[Any]:
        if not tensors:
            return []
        tensors = average.weigh(tensors)
        if self.predivide_factor != 1.0:
            tensors = [scale(tensor, 1 / self.predivide_factor) for tensor in tensors]
        contexts: list[Any] = [None] * len(tensors)
        if self.compression is not None:
            pairs = [self.compression.compress(tensor) for tensor in tensors]
            tensors, contexts = [t for t, _ in pairs], [c for _, c in pairs]
        # Division in a compressed dtype would round once more.
        mean = self.op is ReduceOp.AVERAGE and self.compression is None and self.transport is None
        if self.transport is not None:
            average.send_alone(name)
            tensors = self.transport.sum_tensors(tensors, variables, name=name, group=average.group)
        elif self.op is ReduceOp.ADASUM:
            average.send_alone(name)
            tensors = world.current().engine.allreduce(tensors, self.op, name=name, group=average.group)
        else:
            tensors = average.send_with(tensors, name, mean=mean)
        here = [i for i, tensor in enumerate(tensors) if tensor is not None]
        values = [tensors[i] for i in here]
        if self.compression is not None:
            values = [
                self.compression.decompress(value, contexts[i]) for i, value in zip(here, values, strict=True)
            ]
        factor = self.predivide_factor
        if self.op is ReduceOp.AVERAGE and not mean:
            factor /= average.group.size
        values = [scale(value, factor) for value in values]
        if self.op is ReduceOp.AVERAGE:
            values = average.correct(values)
        result: list[Any] = [None] * len(tensors)
        for i, value in zip(here, values, strict=True):
            result[i] = value
        return result

    def _reduce_rows(self, rows: tf.IndexedSlices, variable: Any, name: str, average: _Average) -> Any:
        """Gathers rows from all ranks, or sums whole tables when the rows would be more than a table.

        The choice is made from the ranks' total number of rows, so all ranks take the same branch.
        """
        engine, group = world.current().engine, average.group
        average.send_alone(name)
        if self.transport is not None:
            (weighed,) = average.weigh([rows])
            total = self.transport.sum_rows(weighed, variable, name=name, group=group)
            if total is None or self.op is not ReduceOp.AVERAGE:
                return total
            (scaled,) = average.correct([scale(total, 1 / group.size)])
            return scaled
        table_rows = _table_shape(rows)[0]
        count = tf.shape(rows.indices, out_type=tf.int64)[:1]
        (number,) = engine.allreduce([count], ReduceOp.SUM, name=f"{name}/rows", group=group)

        def whole_table() -> tuple[tf.Tensor, tf.Tensor]:
            (table,) = self._combine([to_dense(rows)], [variable], f"{name}/table", average)
            return tf.range(table_rows, dtype=rows.indices.dtype), table

        def gathered_rows() -> tuple[tf.Tensor, tf.Tensor]:
            (weighed,) = average.weigh([rows.values])
            indices = engine.allgather(rows.indices, name=f"{name}/indices", group=group)
            values = engine.allgather(weighed, name=f"{name}/values", group=group)
            summed = sum_duplicate_rows(tf.IndexedSlices(values, indices, rows.dense_shape))
            scaled = summed.values
            if self.op is ReduceOp.AVERAGE:
                (scaled,) = average.correct([scale(scaled, 1 / group.size)])
            return summed.indices, scaled

        indices, values = tf.cond(number[0] >= table_rows, whole_table, gathered_rows)
        values = tf.ensure_shape(values, [None, *rows.values.shape[1:]])
        return tf.IndexedSlices(values, indices, rows.dense_shape)


class _Average:
    """How one reduction weighs its ranks: equally, or in a step of `fit()` by their samples.

    Attributes:
        group: the ranks.
    """

    def __init__(self, group: Group, gradients: Sequence[Any], weighed_by: Any, *, by_samples: bool) -> None:
        self.group = group
        # Back-propagation reaches the last layer first.
        first = next((each for each in reversed(gradients) if each is not None), None)
        self._step = joint_step.current() if group.size > 1 else None
        self._sent = self._step is None
        self._correction: Any = None
        self._weighed = weighed_by is not None
        self._share: Any = weighed_by
        if self._step is not None:
            share = weighed_by if self._weighed else self._step.share()
            self._share = share if first is None else self._step.enter(share, first)
        self._factor = self._share
        if self._share is not None and not by_samples:
            self._factor = tf.cast(self._share > 0.0, tf.float32)

    def weigh(self, gradients: Sequence[Any]) -> list[Any]:
        """This rank's gradients, multiplied by its share."""
        if self._weighed or self._step is None:
            return list(gradients)
        return joint_step.weigh(gradients, self._factor)

    def send_with(self, tensors: Sequence[Any], name: str, *, mean: bool = False) -> list[Any]:
        """Sums or averages tensors over the ranks; the first time, what ranks tell each other rides along."""
        engine = world.current().engine
        if self._sent:
            return list(engine.allreduce(tensors, ReduceOp.SUM, name=name, group=self.group, mean=mean))
        self._sent = True
        assert self._step is not None
        sent = [*tensors, self._step.message(self._share)]
        *results, heard = engine.allreduce(sent, ReduceOp.SUM, name=name, group=self.group, mean=mean)
        size = float(self.group.size)
        self._correction = self._step.hear(heard if mean else heard / size, size)
        return results

    def send_alone(self, name: str) -> None:
        """Has the ranks tell each other, unless they have already."""
        if not self._sent:
            self.send_with([], f"{name}/shares")

    def correct(self, means: Sequence[Any]) -> list[Any]:
        """Turns sums of weighed gradients over the number of ranks into means over their samples."""
        return list(means) if self._correction is None else joint_step.weigh(means, self._correction)


def fill_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Groups positions, last first, into buckets that each hold at most `limit` bytes or a single tensor.

    Args:
        sizes: bytes of each tensor.
        limit: bytes of a bucket.

    Returns:
        Buckets of positions in `sizes`, in the order in which back-propagation completes them.
    """
    buckets: list[list[int]] = []
    filled = limit
    for i in reversed(range(len(sizes))):
        if not buckets or filled + sizes[i] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return buckets


def sum_duplicate_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums rows of equal index, so that every index occurs once."""
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    values = tf.ensure_shape(values, [None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def to_dense(slices: tf.IndexedSlices) -> tf.Tensor:
    """The table that holds the slices' rows, duplicates summed, and zeros elsewhere."""
    shape = _table_shape(slices)
    return tf.ensure_shape(tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0]), shape)


def _with_table_shape(gradient: Any, variable: Any) -> Any:
    """Restores the static shape of a sparse gradient's table, which a call of a nested function loses."""
    shape = getattr(variable, "shape", None)
    if not isinstance(gradient, tf.IndexedSlices) or shape is None:
        return gradient
    shape = tf.TensorShape(shape)
    if not shape.is_fully_defined():
        raise ValueError(
            f"A sparse gradient is reduced over ranks only for a variable of known shape; {variable} has shape "
            f"{shape}."
        )
    return tf.IndexedSlices(
        tf.ensure_shape(gradient.values, [None, *shape[1:]]),
        gradient.indices,
        tf.constant(shape.as_list(), tf.int64),
    )


def _table_shape(slices: tf.IndexedSlices) -> list[int]:
    return [int(length) for length in tf.get_static_value(slices.dense_shape)]


def table_bytes(slices: tf.IndexedSlices) -> int:
    """Bytes of the table that the slices are rows of."""
    size = slices.values.dtype.size
    for length in _table_shape(slices):
        size *= length
    return int(size)


def _bytes(tensor: tf.Tensor) -> int:
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def scale(gradient: Any, factor: Any) -> Any:
    """A gradient times a number."""
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scale(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _signature(gradients: Sequence[Any], variables: Sequence[Any]) -> str:
    """What is reduced, in words that are equal on all ranks of one program.

    Collectives are named after it rather than after a counter: a rank that traces in another order, or that
    made an extra optimizer, still meets its peers. Keras numbers layers per process ("dense_3"), so a rank
    that built one more model has other numbers; they are left out.
    """
    parts = []
    for gradient, variable in zip(gradients, variables, strict=True):
        path = str(getattr(variable, "path", None) or getattr(variable, "name", "tensor"))
        path = re.sub(r"_\d+(?=[/:]|$)", "", path)
        if gradient is None:
            kind = "none"
        elif isinstance(gradient, tf.IndexedSlices):
            kind = f"sparse {gradient.dtype.name}{_table_shape(gradient)}"
        else:
            kind = f"{gradient.dtype.name}{gradient.shape.as_list()}"
        parts.append(f"{path}: {kind}")
    return "gradients of " + ", ".join(parts)


def _digest(name: str, signature: str) -> str:
    return f"{name}.{hashlib.sha256(signature.encode()).hexdigest()[:12]}"


def _agree(name: str, signature: str, group: Group) -> None:
    """Finds ranks that reduce different gradients: now in eager mode, soon after tracing in graph mode."""
    control = world.current().control
    if control is None:
        return
    if tf.executing_eagerly():
        control.exchange(name, None, ranks=group.ranks, check=signature)
    else:
        control.announce(f"{name}@{group.index}", signature)


def _occurrence(name: str) -> str:
    """Numbers reductions of one name within one graph, where several may be in flight at once."""
    if tf.executing_eagerly():
        return name
    counts = _occurrences.setdefault(tf.compat.v1.get_default_graph(), {})
    count = counts[name] = counts.get(name, -1) + 1
    return f"{name}#{count}" if count else name
