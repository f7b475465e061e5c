"""`LearningRateScheduleCallback`: the learning rate as a multiple of its start value, by epoch or by step.

The rate is assigned to the optimizer's variable, so the train function is not traced again.

Momentum correction (Goyal et al. 2017, section 2.1): optimizers such as SGD keep a velocity that contains the
learning rate, v = m*v - lr*g. When the rate changes from old to new, the gathered velocity is in the old
unit; it continues as if the rate had always been new if v is multiplied by new/old once. Horovod multiplied
the coefficient m for one step instead; in Keras 3 that is a Python number inside the traced function, which a
callback cannot change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Multiplier = Callable[[float], float]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` to `end_epoch`.

    The rate is logged as "lr" (Horovod's name) and "learning_rate" (Keras's).

    Args:
        initial_lr: the learning rate that multipliers refer to.
        multiplier: a function of the epoch (with `staircase=False` a fraction, epoch + step / steps); or a
            number f, which means f ** (epoch - start_epoch).
        start_epoch: first epoch, 0-based, in which the callback acts.
        end_epoch: epoch before which it stops acting; None for never.
        staircase: whether to act once per epoch, or in every step.
        momentum_correction: whether to rescale the velocities of SGD and RMSprop with the rate.
        steps_per_epoch: only for `staircase=False` with data of unknown length.

    Raises:
        ValueError: `initial_lr` or a length is missing, or the optimizer's rate is a schedule object already.

    Example:
        >>> import tfdist
        >>> halve = tfdist.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** (epoch // 10))

    Reference: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour".
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Multiplier,
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("`initial_lr` is required: the learning rate that multipliers refer to.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else _exponential(multiplier, start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        rate = _innermost(self.model.optimizer)._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but the optimizer follows a "
                f"{type(rate).__name__}. Use one of them: give the optimizer a "
                "number, or leave the callback out."
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} changes the rate within an epoch, but the data have no known "
                    "length. Pass `steps_per_epoch` to the callback."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self.staircase and self._acts():
            self._set_rate(self.initial_lr * self.multiplier(epoch))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and self._acts():
            assert self.steps_per_epoch
            self._set_rate(self.initial_lr * self.multiplier(self._epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = logs["learning_rate"] = self._rate()

    def _acts(self) -> bool:
        return self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_rate(self, new: float) -> None:
        # In every step of a warm-up: no more reads than are needed, and no round through Keras's layers.
        variable = _innermost(self.model.optimizer)._learning_rate.value
        velocities = _velocities(self.model.optimizer) if self.momentum_correction else []
        old = float(variable.numpy()) if velocities else 0.0
        variable.assign(new, read_value=False)
        if velocities and old not in (0.0, float(variable.numpy())):
            _rescale(velocities, new / old)


def _exponential(factor: float, start_epoch: int) -> Multiplier:
    return lambda epoch: factor ** (epoch - start_epoch)


def _innermost(optimizer: Any) -> Any:
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _rescale(variables: list[Any], factor: float) -> None:
    # One operation for each of hundreds of variables, in every step of a warm-up: run them as one function.
    _rescale_all([variable.value for variable in variables], tf.constant(factor))


@tf.function  # type: ignore[untyped-decorator]
def _rescale_all(variables: list[Any], factor: Any) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))


def _velocities(optimizer: Any) -> list[Any]:
    """Optimizer variables that contain the learning rate as a factor."""
    optimizer = _innermost(optimizer)
    if isinstance(optimizer, keras.optimizers.SGD | keras.optimizers.RMSprop) and optimizer.momentum:
        name = "momentums" if isinstance(optimizer, keras.optimizers.SGD) else "_momentums"
        return list(getattr(optimizer, name, ()))
    return []
