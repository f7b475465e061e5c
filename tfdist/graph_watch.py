"""Tells the watchdog about collectives inside a user's own `tf.function`.

In `fit()` the hook around each step does it. In a custom loop nothing of tfdist runs in Python while a graph
waits, so the graph itself tells: one small Python call before the collective and one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import world


def enter(what: str, tensors: Sequence[Any], ranks: Sequence[int]) -> tuple[list[Any], bool]:
    """Makes the graph tell the watchdog that it enters `what` before it uses `tensors`.

    Args:
        what: name of the collective, equal on all ranks.
        tensors: inputs of the collective: tensors, `tf.IndexedSlices`, or None.
        ranks: the world ranks that take part.

    Returns:
        The inputs to use instead, and whether `leave` must be called on the results.
    """
    watchdog = world.current().watchdog
    if watchdog is None or tf.executing_eagerly() or watchdog.watching:
        return list(tensors), False

    def told() -> np.ndarray[Any, Any]:
        watchdog.enter_again(what, ranks)
        return np.int32(0)  # type: ignore[return-value]

    return _after(tf.numpy_function(told, [], tf.int32), tensors), True


def leave(what: str, tensors: Sequence[Any]) -> list[Any]:
    """Makes the graph tell the watchdog that the collective `what`, which gave `tensors`, is over."""
    watchdog = world.current().watchdog
    assert watchdog is not None

    def told() -> np.ndarray[Any, Any]:
        watchdog.leave(what)
        return np.int32(0)  # type: ignore[return-value]

    with tf.control_dependencies([_dense(tensor) for tensor in tensors if tensor is not None]):
        done = tf.numpy_function(told, [], tf.int32)
    return _after(done, tensors)


def _after(operation: Any, tensors: Sequence[Any]) -> list[Any]:
    with tf.control_dependencies([operation]):
        return [None if tensor is None else tf.nest.map_structure(tf.identity, tensor) for tensor in tensors]


def _dense(tensor: Any) -> Any:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
