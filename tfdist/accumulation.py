"""Sums gradients of several backward passes on this rank, so that ranks communicate once per window.

k passes equal one pass with a k-times batch: the inner optimizer, its schedules, averages and `iterations`
advance once per window, unlike Keras's own `gradient_accumulation_steps`, where schedules and moving averages
advance with every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class PassAccumulator:
    """Holds the running sums of a window.

    Args:
        passes: passes per window; 1 hands every gradient straight on.
        average: whether a window's result is the mean of its passes rather than their sum.
    """

    def __init__(self, passes: int, *, average: bool) -> None:
        self.passes = passes
        self._average = average
        self._sums: dict[int, tf.Variable] = {}
        self._seen: tf.Variable | None = None

    def add(
        self, gradients: Sequence[Any], variables: Sequence[Any], flush: Callable[[list[Any]], Any]
    ) -> Any:
        """Adds one pass; calls `flush` with the window's gradients when the pass completes it.

        Args:
            gradients: this pass's gradients; None where a variable has none.
            variables: what they belong to.
            flush: receives the window's gradients, one per variable.
        """
        if self.passes == 1:
            return flush(list(gradients))
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums = [self._sum_for(variables[i], gradients[i]) for i in present]
        if self._seen is None:
            with tf.init_scope():
                self._seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes_seen")
        seen = self._seen
        for total, i in zip(sums, present, strict=True):
            if isinstance(gradients[i], tf.IndexedSlices):
                total.scatter_add(gradients[i])
            else:
                total.assign_add(gradients[i])

        def complete() -> tf.Tensor:
            window: list[Any] = [None] * len(gradients)
            for total, i in zip(sums, present, strict=True):
                value = total.read_value()
                window[i] = value / self.passes if self._average else value
            flush(window)
            for total in sums:
                total.assign(tf.zeros_like(total))
            return seen.assign(0)

        tf.cond(tf.equal(seen.assign_add(1), self.passes), complete, lambda: seen.read_value())
        return None

    def _sum_for(self, variable: Any, gradient: Any) -> tf.Variable:
        key = id(variable)
        if key not in self._sums:
            # A variable cannot be made inside tf.function after its first trace; lift it out.
            with tf.init_scope():
                self._sums[key] = tf.Variable(
                    tf.zeros(variable.shape, gradient.dtype), trainable=False, name="gradient_sum"
                )
        return self._sums[key]
