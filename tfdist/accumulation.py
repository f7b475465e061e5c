"""Sums gradients of several backward passes on this rank, so that ranks communicate once per window.

k passes equal one pass with a k-times batch: the inner optimizer, its schedules, averages and `iterations`
advance once per window, unlike Keras's own `gradient_accumulation_steps`, where schedules and moving averages
advance with every pass.

The passes of an epoch need not fill its last window. Only the end of the epoch tells, so a window is closed by a
call of its own, with the number of passes that it holds: the largest of the ranks' numbers, since a rank without
data goes on making empty passes until all ranks know that nobody has any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import joint_step, keras_compat

Flush = Callable[[list[Any], Any], Any]


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
        # Of the last pass: the sums that it added to, None for variables without a gradient.
        self._added: list[tf.Variable | None] = []
        self._is_counted = False
        self._is_weighed = False
        self._seen: Any = None  # passes so far, the same on all ranks
        self._held: Any = None  # how many there were when this rank last had data
        self._shares: Any = None

    def another(self) -> PassAccumulator:
        """One with the same arguments and sums of its own."""
        return PassAccumulator(self.passes, average=self._average)

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], flush: Flush) -> Any:
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
        step = joint_step.current()
        self._prepare(gradients, variables, step)
        share = tf.constant(1.0) if step is None else step.share()
        self._shares.assign_add(share)
        by = _times if self._is_counted else _weigh
        added = gradients if step is None else _weighed(gradients, share, by=by)
        for total, gradient in zip(self._added, added, strict=True):
            if total is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(gradient)
            else:
                total.assign_add(gradient)
        seen = self._seen.assign_add(1)
        self._held.assign(tf.where(share > 0.0, seen, self._held.read_value()))

        def complete() -> tf.Tensor:
            flush(*self._window(float(self.passes)))
            self._empty(unless=False if step is None else step.stays_open)
            return tf.constant(True)

        tf.cond(seen >= self.passes, complete, lambda: tf.constant(False))
        return None

    @property
    def passes_held(self) -> int:
        """Passes of the open window, to the last in which this rank had data; 0 for none."""
        return 0 if self._held is None else int(self._held.numpy())

    def close(self, passes: int, flush: Flush) -> None:
        """Calls `flush` with what the open window holds, eagerly; the next pass begins another.

        Args:
            passes: how many passes hold data of any rank; without one nothing is flushed.
            flush: as `add`'s.
        """
        if self._seen is None:
            return
        if passes:
            flush(*self._window(float(passes)))
        self._empty(unless=False)

    def carry(self, passes: int) -> None:
        """Goes on with the open window after `passes` passes that hold data of any rank."""
        if self._seen is not None:
            self._seen.assign(passes)
            self._held.assign(passes)

    def _prepare(self, gradients: Sequence[Any], variables: Sequence[Any], step: Any) -> None:
        self._is_weighed = step is not None
        self._is_counted = step is not None and step.is_counted
        self._added = [
            None if gradient is None else self._sum_for(variable, gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        if self._seen is None:
            with keras_compat.plain_variables():
                self._held = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes_held")
                self._shares = tf.Variable(0.0, trainable=False, name="shares_seen")
                self._seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes_seen")

    def _window(self, passes: float) -> tuple[list[Any], Any]:
        """The gradients of a window of `passes` passes, and their share."""
        shares = self._shares.read_value()
        times = 1.0 if self._average else passes

        def mean(total: tf.Variable) -> Any:
            value = total.read_value()
            if self._is_counted:  # nobody else has a part in the mean
                return tf.math.divide_no_nan(value, tf.cast(shares, value.dtype)) * times
            return value / passes * times

        window = [None if total is None else mean(total) for total in self._added]
        return window, shares / passes if self._is_weighed and not self._is_counted else None

    def _empty(self, *, unless: Any) -> None:
        for variable in [*self._sums.values(), self._shares, self._seen, self._held]:
            variable.assign(tf.where(unless, variable.read_value(), tf.zeros_like(variable)))

    def _sum_for(self, variable: Any, gradient: Any) -> tf.Variable:
        key = id(variable)
        if key not in self._sums:
            # A variable cannot be made inside tf.function after its first trace; lift it out.
            with keras_compat.plain_variables():
                self._sums[key] = tf.Variable(
                    tf.zeros(variable.shape, gradient.dtype), trainable=False, name="gradient_sum"
                )
        return self._sums[key]


def _weighed(gradients: Sequence[Any], share: Any, *, by: Callable[[Any, Any], Any]) -> list[Any]:
    return [None if gradient is None else by(gradient, share) for gradient in gradients]


def _weigh(gradient: Any, share: Any) -> Any:
    return joint_step.weigh([gradient], share)[0]


def _times(gradient: Any, share: Any) -> Any:
    """As `joint_step.weigh`, of a share that is hardly ever 1, in operations that XLA knows, too."""
    values = joint_step.values_of(gradient)
    return joint_step.with_values(gradient, tf.math.multiply_no_nan(values, tf.cast(share, values.dtype)))
