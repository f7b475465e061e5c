"""What ranks agree on within one training step, at no extra message: their shares of the batch, and who leaves.

Problem: in `fit()` ranks need more from each other than gradients. A rank with a smaller batch must count less; a
rank that has run out of data must not count at all, and the others must not wait for it; a rank whose callback
stops training, or fails, must take the others with it.

Solution: a few numbers ride in the same all-reduce as the gradients:

    sent by a rank     share of the step, 1 if it has data, 1 if it wants to stop, 1 if it has failed
    mean over ranks    divisor of the average, part of the ranks with data, stop?, failed?

Where passes are accumulated (see `accumulation`) the share is that of a window, sent with its last pass, and the
second number tells whether the rank had data in that last pass.

A step in which somebody stops or fails, or in which nobody has data, updates nothing, on any rank: every rank
sees the same means, and takes the same branch. So all ranks end with the weights of the last step before.

A share is the number of samples in a rank's batch over a unit that all ranks know: the largest mean batch of a
step so far. In ordinary steps it is exactly 1, and costs no multiplication of gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

_CPU = "/device:CPU:0"
FULL_SHARE = 64.0  # the first unit: any number will do, but a share far from 1 strains small floats
# Places in what is sent and averaged; the last is empty on the way, and counts steps in what is kept.
_SHARE, _ACTIVE, _STOP, _FAIL, _COUNT = range(5)
_NOTHING_YET = [0.0, -1.0, 0.0, 0.0, 0.0]
_NEVER = [0.0, 0.0, 0.0, 0.0, -1.0]
_KEPT = [0.0, 0.0, 1.0, 1.0, 1.0]
_ONE_MORE = [0.0, 0.0, 0.0, 0.0, 1.0]
# Weights with which a sum over a message is positive exactly if somebody has data and nobody stops or has failed:
# the mean of a flag that one of N ranks raises is 1/N.
_PROCEEDS = [0.0, 1.0, -1e9, -1e9, 0.0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the last step of a model came to, equal on all ranks.

    Attributes:
        active: ranks that had data; -1 before the first reduction of an epoch.
        stop: whether a rank wants to stop, since the epoch began.
        failed: whether a rank has failed.
        count: steps of the epoch so far, with data or without.
    """

    active: int
    stop: bool
    failed: bool
    count: int


class JointSteps:
    """The steps of one model: what this rank says in each, and what came of the last.

    Its variables live on the CPU, and functions that were traced with it go on reading them.

    Attributes:
        windows: optimizers that accumulate passes in these steps, in the order in which they were traced.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device(_CPU):
            self._says = tf.Variable([0.0, 0.0, 0.0], trainable=False, name="joint_step_says")
            # The mean of the last messages, in which flags stay up.
            self._heard = tf.Variable(_NOTHING_YET, trainable=False, name="joint_step_heard")
            # What was heard when this rank last began to exchange.
            self._entered = tf.Variable(_NEVER, trainable=False, name="joint_step_entered")
            # Negative until the first step has measured one.
            self._unit = tf.Variable(-FULL_SHARE, trainable=False, name="joint_step_unit")
        self._ranks = 1.0
        self.windows: list[Any] = []

    def begin_epoch(self) -> None:
        """Forgets what the steps of the last epoch came to."""
        self._says.assign([0.0, 0.0, 0.0])
        self._heard.assign(_NOTHING_YET)
        self._entered.assign(_NEVER)

    def say(self, *, stop: bool, failed: bool) -> None:
        """What this rank tells the others in the steps from now on."""
        self._says.assign([float(stop), float(failed), 0.0])

    @property
    def outcome(self) -> Outcome:
        """What the last step came to."""
        # After every step, so by the shortest way.
        heard = tf.raw_ops.ReadVariableOp(resource=self._heard.handle, dtype=tf.float32).numpy().tolist()
        active = round(heard[_ACTIVE] * self._ranks) if heard[_ACTIVE] >= 0.0 else -1
        return Outcome(active, heard[_STOP] > 0.0, heard[_FAIL] > 0.0, int(heard[_COUNT]))

    @property
    def is_midway(self) -> bool:
        """Whether this rank has begun to exchange in a step that it has not finished."""
        return bool(self._entered[_COUNT] == self._heard[_COUNT])

    @contextlib.contextmanager
    def step(self, samples: Any, *, closes: bool = False) -> Iterator[None]:
        """Inside, while traced or run eagerly, reductions of gradients belong to one step of this model.

        Args:
            samples: rows of this rank's batch, a scalar; None to take part without data.
            closes: whether what is reduced is of passes before, which no other will follow.
        """
        outer, _current.step = _current.step, _Step(self, samples, closes=closes)
        try:
            yield
            with tf.device(_CPU):
                self._heard.assign_add(_ONE_MORE)
        finally:
            _current.step = outer


class _Current(threading.local):
    step: Any = None
    alone = False


class _Step:
    """One step while it is traced or run."""

    is_counted = False

    def __init__(self, steps: JointSteps, samples: Any, *, closes: bool = False) -> None:
        self._steps = steps
        self.idle = samples is None
        self.windows = steps.windows
        self._samples = samples
        self._closes = closes
        self._proceeds: Any = None
        self.stays_open: Any = False

    def share(self) -> Any:
        """This rank's part in the average, a float32 scalar."""
        with tf.device(_CPU):
            if self.idle:
                return tf.constant(0.0)
            return tf.cast(self._samples, tf.float32) / tf.abs(self._steps._unit)

    def enter(self, share: Any, gradient: Any) -> Any:
        """Notes that this rank begins to exchange.

        Args:
            share: its share.
            gradient: what is known when a gradient is: before, nothing has gone out, and the step may still fail
                without the others.

        Returns:
            `share`, for what is sent to depend on.
        """
        with tf.device(_CPU):
            with tf.control_dependencies([values_of(gradient)]):
                noted = self._steps._entered.assign(self._steps._heard.read_value())
            with tf.control_dependencies([noted]):
                return tf.identity(share)

    def message(self, share: Any) -> Any:
        """What rides with the gradients: float32, shape [5]."""
        with tf.device(_CPU):
            active = tf.sign(share if self._closes else self.share())
            return tf.concat([tf.stack([share, active]), self._steps._says.read_value()], 0)

    def hear(self, mean: Any, size: float) -> Any:
        """Takes the mean of all ranks' messages.

        Args:
            mean: float32, shape [5].
            size: number of ranks.

        Returns:
            What turns a mean over ranks into one over their samples, a float32 scalar, in ordinary steps 1.
        """
        steps = self._steps
        steps._ranks = size
        with tf.device(_CPU):
            heard = tf.maximum(mean, steps._heard * _KEPT)
            steps._heard.assign(heard)
            self._proceeds = proceeds(heard)
            # Nobody had data in the last pass of a window: it holds fewer, and waits to be closed.
            self.stays_open = tf.reduce_sum(heard * [0.0, 1.0, 1.0, 1.0, 0.0]) <= 0.0
            share = mean[_SHARE]
            unit = steps._unit.read_value()
            steps._unit.assign(tf.maximum(unit, tf.math.divide_no_nan(share, mean[_ACTIVE]) * tf.abs(unit)))
            # Division by the number of ranks may have rounded.
            return tf.where(tf.abs(share - 1.0) < 1e-6, 1.0, tf.math.divide_no_nan(1.0, share))

    def update(self, apply: Callable[[], Any]) -> None:
        """Calls `apply` unless the step updates nothing."""
        if self._proceeds is None:
            apply()
        elif tf.executing_eagerly():
            if bool(self._proceeds):
                apply()
        else:

            def applied() -> Any:
                apply()
                return tf.constant(True)

            tf.cond(self._proceeds, applied, lambda: tf.constant(False))


_current = _Current()


def proceeds(message: Any) -> Any:
    """Whether a step updates anything, by the sum or mean of all ranks' messages: a bool scalar."""
    return tf.reduce_sum(message * _PROCEEDS) > 0.0


def current() -> Any:
    """The step that is being traced or run, if it is one of `fit()`."""
    return _current.step


class _Counted:
    """A step that nobody else must be told of, of one rank or of replicas that `tf.distribute` keeps together."""

    idle = False
    is_counted = True
    stays_open = False

    def __init__(self, rows: Callable[[], Any], windows: list[Any]) -> None:
        self._rows = rows
        self.windows = windows

    def share(self) -> Any:
        return tf.cast(self._rows(), tf.float32) / FULL_SHARE

    def update(self, apply: Callable[[], Any]) -> None:
        apply()


@contextlib.contextmanager
def counting(rows: Callable[[], Any], windows: list[Any]) -> Iterator[None]:
    """Inside, a pass counts by its rows.

    Args:
        rows: returns the number of those of all replicas, a scalar.
        windows: gets the optimizers that accumulate passes inside, as `JointSteps.windows`.
    """
    outer, _current.step = _current.step, _Counted(rows, windows)
    try:
        yield
    finally:
        _current.step = outer


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank trains without the others, which nothing may ask; see `tfdist.local`."""
    before, _current.alone = _current.alone, True
    try:
        yield
    finally:
        _current.alone = before


def is_alone() -> bool:
    """Whether this rank trains without the others, as in `tfdist.local()`."""
    return _current.alone


def weigh(gradients: Sequence[Any], share: Any) -> list[Any]:
    """Multiplies gradients by a rank's share: no work where it is 1, zeros even of NaN where it is 0."""
    ordinary = tf.equal(share, 1.0)
    return [with_values(gradient, _weighed(values_of(gradient), share, ordinary)) for gradient in gradients]


def _weighed(values: Any, share: Any, ordinary: Any) -> Any:
    if tf.executing_eagerly():
        return values if bool(ordinary) else tf.math.multiply_no_nan(values, tf.cast(share, values.dtype))
    # What `tf.cond` becomes when it runs, at a third of its operations.
    changed, same = tf.raw_ops.Switch(data=values, pred=ordinary)
    changed = tf.math.multiply_no_nan(changed, tf.cast(share, values.dtype))
    return tf.raw_ops.Merge(inputs=[same, changed]).output


def values_of(gradient: Any) -> Any:
    """The numbers of a gradient, dense or of some rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def with_values(gradient: Any, values: Any) -> Any:
    """A gradient for the same rows, of other numbers."""
    if not isinstance(gradient, tf.IndexedSlices):
        values.set_shape(gradient.shape)
        return values
    values.set_shape(gradient.values.shape)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
