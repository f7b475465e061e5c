"""Sums gradients of several backward passes on this rank, so that ranks communicate once per window.

k passes equal one pass with a k-times batch: the inner optimizer, its schedules, averages and `iterations`
advance once per window, unlike Keras's own `gradient_accumulation_steps`, where schedules and moving averages
advance with every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import joint_step, keras_compat


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
        self._shares: tf.Variable | None = None

    def another(self) -> PassAccumulator:
        """One with the same arguments and sums of its own."""
        return PassAccumulator(self.passes, average=self._average)

    def add(
        self, gradients: Sequence[Any], variables: Sequence[Any], flush: Callable[[list[Any], Any], Any]
    ) -> Any:
        """Adds one pass; calls `flush` with the window's gradients when the pass completes it.

        In `fit()` a pass counts by its samples.

        Args:
            gradients: this pass's gradients; None where a variable has none.
            variables: what they belong to.
            flush: receives the window's gradients, one per variable, and the share that they were multiplied by,
                None for none.
        """
        if self.passes == 1:
            return flush(list(gradients), None)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums = [self._sum_for(variables[i], gradients[i]) for i in present]
        if self._seen is None or self._shares is None:
            with keras_compat.plain_variables():
                self._seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes_seen")
                self._shares = tf.Variable(0.0, trainable=False, name="shares_seen")
        seen, shares = self._seen, self._shares
        step = joint_step.current()
        added = [gradients[i] for i in present]
        if step is not None:
            share = step.share()
            added = joint_step.weigh(added, share)
            shares.assign_add(share)
        for total, gradient in zip(sums, added, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(gradient)
            else:
                total.assign_add(gradient)

        def complete() -> tf.Tensor:
            window: list[Any] = [None] * len(gradients)
            for total, i in zip(sums, present, strict=True):
                value = total.read_value()
                window[i] = value / self.passes if self._average else value
            flush(window, shares.read_value() / self.passes if step is not None else None)
            for total in sums:
                total.assign(tf.zeros_like(total))
            shares.assign(0.0)
            return seen.assign(0)

        tf.cond(tf.equal(seen.assign_add(1), self.passes), complete, lambda: seen.read_value())
        return None

    def _sum_for(self, variable: Any, gradient: Any) -> tf.Variable:
        key = id(variable)
        if key not in self._sums:
            # A variable cannot be made inside tf.function after its first trace; lift it out.
            with keras_compat.plain_variables():
                self._sums[key] = tf.Variable(
                    tf.zeros(variable.shape, gradient.dtype), trainable=False, name="gradient_sum"
                )
        return self._sums[key]
