"""A batch in micro-batches, and back.

A batch of B rows in M micro-batches has ⌊B/M⌋ or ⌈B/M⌉ rows in each. Where there are fewer rows than micro-batches
some would be empty, and means over them no numbers; those repeat a row, which is left out again when they are
joined and has no share in the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.layers.tensor_leaves import TensorLeaves, holds_composite


class MicroBatches:
    """The inputs of a model in micro-batches.

    Args:
        inputs: tensors with the batch as their first axis, with or without masks.
        count: how many.

    Raises:
        ValueError: sparse or ragged tensors.
    """

    def __init__(self, inputs: Sequence[Any], count: int) -> None:
        if holds_composite(list(inputs)):
            raise ValueError(
                "A batch with sparse or ragged tensors can't be cut into micro-batches; received one."
            )
        self._leaves = TensorLeaves(
            [tf.convert_to_tensor(each) if not tf.is_tensor(each) else each for each in inputs]
        )
        self._count = count
        batch = self._leaves.tensors[0]
        self._rows = tf.shape(batch)[0] if batch.shape[0] is None else batch.shape[0]

    def piece(self, number: int) -> list[Any]:
        """The inputs of a micro-batch."""
        start, end = self._bounds(number)
        end = tf.maximum(end, start + 1) if tf.is_tensor(end) else max(end, start + 1)
        pieces: list[Any] = self._leaves.filled([each[start:end] for each in self._leaves.tensors])
        return pieces

    def share(self, number: int) -> Any:
        """Rows of a micro-batch over rows of the batch, a float32 scalar."""
        start, end = self._bounds(number)
        return tf.math.divide_no_nan(tf.cast(end - start, tf.float32), tf.cast(self._rows, tf.float32))

    def joined(self, pieces: Sequence[Any]) -> Any:
        """The whole of one tensor that was made of every micro-batch.

        Raises:
            ValueError: it has no batch axis.
        """
        if not all(tf.is_tensor(piece) and piece.shape.rank for piece in pieces):
            raise ValueError(
                "What a model in a pipeline returns are dense tensors with the batch as their first axis; received "
                f"{pieces[0]!r}."
            )
        leaves = [TensorLeaves([piece]) for piece in pieces]
        wholes = []
        for parts in zip(*(each.tensors for each in leaves), strict=True):
            rows = [end - start for start, end in map(self._bounds, range(self._count))]
            wholes.append(tf.concat([part[:row] for part, row in zip(parts, rows, strict=True)], 0))
        return leaves[0].filled(wholes)[0]

    def _bounds(self, number: int) -> tuple[Any, Any]:
        return self._rows * number // self._count, self._rows * (number + 1) // self._count
