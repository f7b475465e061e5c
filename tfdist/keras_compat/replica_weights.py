"""What a replica's mean loss counts in the loss of the global batch (Keras >= 3.3).

Problem: in replica context Keras divides a mean loss by the number of replicas, so that their gradients can be
summed. With a ragged last batch replicas have different numbers of rows, and rows on the smaller ones count more:
after one epoch weights are off by 1e-2.

Solution: while a train step is traced or run, `scale_loss_for_distribution` multiplies by this replica's share of
the rows, and `unscale_loss_for_distribution` divides by it. Gradients need no further weighing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Step(threading.local):
    weight: Any = None


_step = _Step()


@contextlib.contextmanager
def weighing_by(weight: Any) -> Iterator[None]:
    """Inside, on this thread, mean losses of this replica count `weight`, a scalar; None for Keras's own way."""
    before, _step.weight = _step.weight, weight
    try:
        yield
    finally:
        _step.weight = before


def replica_weight() -> Any:
    """The weight of this thread's replica, or None."""
    return _step.weight


def scale_by_rows(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def scale_loss_for_distribution(value: Any) -> Any:
        import tensorflow as tf

        if _step.weight is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return value * tf.cast(_step.weight, value.dtype)

    return scale_loss_for_distribution


def unscale_by_rows(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unscale_loss_for_distribution(value: Any) -> Any:
        import tensorflow as tf

        if _step.weight is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return tf.math.divide_no_nan(value, tf.cast(_step.weight, value.dtype))

    return unscale_loss_for_distribution
