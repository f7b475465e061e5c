"""One loss of the whole batch, computed on the first rank from all ranks' outputs.

Problem: a contrastive or ranking loss compares every row of the batch with every other. The mean of the ranks'
losses is not that of the batch.

Solution: ranks send their outputs, targets and sample weights to the first one, which computes the loss and its
gradient by the outputs, and sends each rank its rows of that:

    worker ── outputs, targets, weights ──> server: loss, d loss / d outputs ── rows, loss ──> worker: backward pass

A worker sends the bytes of its outputs, targets and weights and receives those of its outputs (on TensorFlow's own
engine, whose all-to-all pads, N-1 times that). The server keeps the outputs of all ranks and as many gradients, and
what the loss needs between them: N·b squared numbers, if it compares all pairs. Regularization stays on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import joint_step, world
from tfdist.collectives.base import Group
from tfdist.collectives.sink import Sink
from tfdist.errors import TfdistError

# (targets, outputs, sample weights) -> loss of these rows, a scalar, with the model's regularization.
Loss = Callable[[Any, Any, Any], Any]
_COUNTS = tf.int32


class ServedLoss:
    """Computes a loss on the first rank of a group.

    Args:
        name: identifies the messages on all ranks.
        group: the ranks that train together.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._name = name
        self._group = group
        self._sink = Sink()

    def __call__(self, model: Any, compute: Loss, targets: Any, outputs: Any, weights: Any) -> Any:
        """The loss of all ranks' rows, with the gradient by this rank's.

        Every rank of the group calls it, in each step, with structures alike.

        Args:
            model: whose loss it is.
            compute: computes it.
            targets: a structure of tensors with one row per sample.
            outputs: the model's, likewise.
            weights: one number per sample, or None.

        Raises:
            TfdistError: there are others than dense tensors of numbers, or `compute` reads weights itself.
        """
        step = joint_step.current()
        idle = step is not None and step.idle
        flat = [tf.convert_to_tensor(each) for each in keras.tree.flatten(outputs)]
        beside = keras.tree.flatten((targets, weights))
        _require_rows([*flat, *(each for each in beside if each is not None)])

        fixed = [tf.stop_gradient(each) for each in flat]
        value, rows = self._exchange(
            lambda *given: tf.cast(compute(*given), tf.float32) - _regularization(model),
            fixed, outputs, beside, (targets, weights), idle,
        )  # fmt: skip
        # Nothing in value, and `rows` in its gradient.
        linear = tf.add_n(
            [
                # A rank without data has no rows, and needs a gradient all the same.
                tf.reduce_sum(tf.cast(each, tf.float32) * (0.0 if idle else row))
                for each, row in zip(flat, rows, strict=True)
            ]
        )
        # Regularization depends on the weights directly: each rank has its own.
        with tf.GradientTape() as tape:
            direct = compute(targets, keras.tree.map_structure(tf.stop_gradient, outputs), weights)
        _require_none_but_regularized(model, tape.watched_variables())
        direct = tf.cast(direct, tf.float32)
        value = tf.stop_gradient(value + _regularization(model))
        return value + (linear - tf.stop_gradient(linear)) + (direct - tf.stop_gradient(direct))

    def _exchange(
        self, compute: Loss, own: Any, outputs: Any, beside: Any, structure: Any, idle: bool
    ) -> tuple[Any, list[Any]]:
        """The loss, and its float32 gradients by this rank's outputs, times what averaging over ranks takes off."""
        group, here = self._group, world.rank()
        serves, size = here == group.ranks[0], group.size
        count = tf.constant(0, _COUNTS) if idle else tf.shape(own[0])[0]
        to_server = tf.concat([[count], tf.zeros([size - 1], _COUNTS)], 0)
        sent = [*own, *(each for each in beside if each is not None)]
        gathered, counts = [], tf.zeros([size], _COUNTS)
        for place, rows in enumerate(sent):
            received, counts = self._alltoall(rows[:count], to_server, f"outputs/{place}")
            gathered.append(received)
        if not serves:
            nothing = tf.zeros([size], _COUNTS)
            none = [tf.cast(each[:0], tf.float32) for each in own]
            rows = [self._alltoall(each, nothing, f"gradients/{k}")[0] for k, each in enumerate(none)]
            value = self._alltoall(tf.reshape(none[0], [-1]), nothing, "loss")[0]
            return value[0], rows
        # Half precision is not enough for a gradient without the optimizer's loss scale.
        whole = [tf.cast(each, tf.float32) for each in gathered[: len(own)]]
        rest = iter(gathered[len(own) :])
        targets, weights = keras.tree.pack_sequence_as(
            structure, [None if each is None else next(rest) for each in beside]
        )
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(whole)
            loss = compute(targets, keras.tree.pack_sequence_as(outputs, whole), weights)
        gradients = tape.gradient(loss, whole, unconnected_gradients="zero")
        # A rank's gradient counts by its part of the rows; here each has been given its part already.
        parts = tf.cast(tf.reduce_sum(counts), tf.float32) / tf.cast(tf.maximum(counts, 1), tf.float32)
        factors = tf.repeat(parts, counts)
        rows = []
        for place, gradient in enumerate(gradients):
            scaled = gradient * tf.reshape(factors, [-1, *[1] * (gradient.shape.rank - 1)])
            rows.append(self._alltoall(scaled, counts, f"gradients/{place}")[0])
        value = self._alltoall(tf.fill([size], loss), tf.ones([size], _COUNTS), "loss")[0]
        return value[0], rows

    def _alltoall(self, rows: Any, splits: Any, what: str) -> tuple[Any, Any]:
        engine = world.current().engine
        carried = rows if rows.dtype.name in engine.native_dtypes else tf.cast(rows, tf.int64)
        # A graph begins with what depends on nothing: a step that ends for want of data must not have begun this.
        with tf.control_dependencies([carried]):
            splits = tf.identity(splits)
        received, counts = engine.alltoall(carried, splits, name=f"{self._name}/{what}", group=self._group)
        self._sink.consume([received])
        return tf.cast(received, rows.dtype), counts


def _regularization(model: Any) -> Any:
    return tf.add_n([tf.zeros([]), *(tf.reduce_sum(tf.cast(each, tf.float32)) for each in model.losses)])


def _require_none_but_regularized(model: Any, read: Sequence[Any]) -> None:
    """What the loss takes from weights, not from outputs, would be that of one rank's rows."""
    known = {id(variable.value): variable for variable in model.trainable_variables}
    for each in read:
        variable = known.get(id(each))
        if variable is not None and getattr(variable, "regularizer", None) is None:
            raise TfdistError(
                f"server_loss=True computes the loss on the first rank from outputs, and the loss of model "
                f"{model.name!r} reads the weights {variable.path!r} itself. Use them in the model's call."
            )


def _require_rows(tensors: list[Any]) -> None:
    for each in tensors:
        dense = isinstance(each, tf.Tensor)
        if not dense or not each.shape.rank or each.dtype == tf.string:
            raise TfdistError(
                "server_loss=True sends outputs, targets and sample weights to the first rank, row by row. They "
                f"must be dense tensors of numbers with one row per sample; received {each}."
            )
