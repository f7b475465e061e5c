"""How a batch is cut into slices, outside and under XLA.

Problem: B rows in k slices leave a shorter last one where k doesn't divide B. XLA compiles one loop body for one
shape, so under XLA slices must be equal.

Solution: outside XLA, slices of ⌈B/k⌉ rows, the last with what is left. Under XLA, the largest number of slices
up to k that divides B; a batch whose size has no such divisor is one slice. Where the size is known only when
the function runs, both are computed then; under XLA that is when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Slices:
    """Slices of a batch.

    Attributes:
        count: how many, an int32 scalar or an int.

    Args:
        batch: a tensor whose first axis is the batch.
        steps: the most slices wanted.
    """

    def __init__(self, batch: Any, steps: int) -> None:
        static = batch.shape[0]
        self.rows: Any = tf.shape(batch)[0] if static is None else static
        self._equal = _is_compiled_by_xla()
        self._static = static
        if self._equal:
            self.count = _largest_divisor(self.rows, steps)
            self._size = self.rows // self.count
        elif static is not None:
            self._size = -(-static // steps) if static else 1
            self.count = max(1, -(-static // self._size))
        else:
            self._size = tf.maximum(1, (self.rows + steps - 1) // steps)
            self.count = tf.maximum(1, (self.rows + self._size - 1) // self._size)
        known = static is not None and (self._equal or static % self._size == 0)
        self._static_size = self._size if known else None

    def belongs(self, tensor: Any) -> bool:
        """Whether a tensor is sliced: it has as many rows as the batch."""
        return tensor.shape.rank is not None and tensor.shape.rank > 0 and tensor.shape[0] == self._static

    def prepared(self, tensor: Any) -> Any:
        """What `piece` takes: computed once, outside of the loop."""
        if not self._equal:
            return tensor
        shape = tf.concat([[self.count, self._size], tf.shape(tensor)[1:]], 0)
        return tf.ensure_shape(
            tf.reshape(tensor, shape), [None, self._static_size, *tensor.shape[1:]], name="slices"
        )

    def piece(self, prepared: Any, number: Any) -> Any:
        """The slice `number` of a batch."""
        if self._equal:
            return prepared[number]
        start = number * self._size
        piece = prepared[start : tf.minimum(start + self._size, self.rows)]
        return tf.ensure_shape(piece, [self._static_size, *prepared.shape[1:]])

    def share(self, number: Any) -> Any:
        """Rows of a slice over rows of the batch, a float32 scalar."""
        if self._equal:
            return 1.0 / tf.cast(self.count, tf.float32)
        start = number * self._size
        rows = tf.cast(self.rows, tf.float32)
        return tf.math.divide_no_nan(tf.cast(tf.minimum(self._size, self.rows - start), tf.float32), rows)

    def array(self, dtype: Any, shape: Any) -> Any:
        """Holds one piece of a result for each slice; `shape` is that of a piece."""
        return tf.TensorArray(
            dtype, size=self.count, element_shape=[self._static_size, *shape[1:]], infer_shape=False
        )

    def joined(self, array: Any, shape: Any) -> Any:
        """The batch whose pieces an array of `array` holds."""
        if self._equal:
            pieces = array.stack()
            whole = tf.reshape(pieces, tf.concat([[self.rows], tf.shape(pieces)[2:]], 0))
        else:
            whole = array.concat()
        return tf.ensure_shape(whole, [self._static, *shape[1:]])

    def sample(self, tensors: Sequence[Any]) -> list[Any]:
        """The first slices of batches, for a look at what comes of them; other tensors as they are."""
        return [
            self.piece(self.prepared(tensor), 0) if self.belongs(tensor) else tf.identity(tensor)
            for tensor in tensors
        ]


def _largest_divisor(rows: Any, steps: int) -> Any:
    if isinstance(rows, int):
        return max(divisor for divisor in range(1, steps + 1) if rows % divisor == 0)
    divisors = tf.range(1, steps + 1)
    return tf.reduce_max(tf.where(rows % divisors == 0, divisors, 1))


def _is_compiled_by_xla() -> bool:
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
