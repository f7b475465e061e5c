"""Keeps collectives in a rank's graph whose result this rank has no use for.

TensorFlow prunes operations that nothing consumes, collectives too: those of Horovod and the sending half of a
broadcast. Then the other ranks wait for ever for a rank that only sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Sink:
    """Consumes tensors, at no cost."""

    def __init__(self) -> None:
        self._last: tf.Variable | None = None

    def consume(self, tensors: Sequence[Any]) -> None:
        """Makes the graph that is being traced compute `tensors`; does nothing when executing eagerly."""
        if tf.executing_eagerly():
            return
        if self._last is None:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                self._last = tf.Variable(0.0, trainable=False, name="sink")
        # The size alone would be known while tracing, and a constant depends on nothing.
        for tensor in tensors:
            value = tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32))
            with tf.device("/device:CPU:0"):
                self._last.assign(value)
