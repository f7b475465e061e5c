"""Ties the second run of a recomputation to the gradients that it is for.

Problem: TensorFlow's graph optimizer and XLA merge equal operations on equal inputs, so a second run is merged
with the first, whose results are then kept after all. And nothing keeps a second run from starting at once, so that
all of them hold their memory together. Control dependencies prevent that outside XLA only, and XLA's own barrier
against optimization does not prevent it.

Solution: a dependency on data. Something that is always zero, but only once the incoming gradients are known, is
added to the inputs of the second run. It is -0.0, which changes no float, not even the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def tie(values: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """`values`, available only when all of `gradients` are.

    Args:
        values: tensors of any dtype and shape; booleans, strings and handles are returned as they are.
        gradients: tensors, IndexedSlices or None; those that aren't floats don't count.
    """
    if tf.executing_eagerly():
        return [tf.identity(value) for value in values]
    marks = [_mark(gradient) for gradient in gradients if gradient is not None and gradient.dtype.is_floating]
    if not marks:
        return [tf.identity(value) for value in values]
    zero = _zero(tf.add_n(marks))
    return [_add(value, zero) for value in values]


def _mark(gradient: Any) -> Any:
    """One number that is known when the gradient is."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.cast(tf.reshape(values, [-1])[:1], tf.float32))


def _zero(mark: Any) -> Any:
    """Negative zero, which no compiler knows; a positive one where gradients aren't finite."""
    return tf.where(tf.math.is_finite(mark), tf.constant(-0.0), tf.constant(0.0))


def _add(value: Any, zero: Any) -> Any:
    if value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_complex:
        return value + tf.cast(zero, value.dtype)
    return tf.identity(value)
