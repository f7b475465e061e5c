"""`LearningRateWarmupCallback`: from the rate of one rank to the rate of the world, step by step."""

from __future__ import annotations

from typing import Any

from tfdist import world
from tfdist.callbacks.learning_rate_schedule import LearningRateScheduleCallback


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` during the first epochs.

    N ranks make a global batch N times as large, for which the rate is scaled by N; at the start, while
    weights change fast, that rate is too large. After step k of n per epoch, the rate is

        initial_lr / size * (1 + (size - 1) * (epoch + (k + 1) / n) / warmup_epochs)

    so the last warm-up step uses `initial_lr` exactly. With one rank the rate stays `initial_lr`.

    Args:
        initial_lr: the rate after warm-up, that is, already scaled by the number of ranks.
        warmup_epochs: length of the warm-up.
        momentum_correction: whether to rescale the velocities of SGD and RMSprop with the rate.
        steps_per_epoch: only for data of unknown length.
        verbose: 1 prints a line on rank 0 when the warm-up is over.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> warmup = tfdist.callbacks.LearningRateWarmupCallback(0.1 * tfdist.size(), warmup_epochs=3)

    Reference: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._share,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        if warmup_epochs <= 0:
            raise ValueError(f"`warmup_epochs` must be positive. Received: {warmup_epochs}.")
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _share(self, epoch: float) -> float:
        """Part of `initial_lr` for the step that begins at `epoch`, a fraction."""
        assert self.steps_per_epoch
        # The step counts as done, so that the last step of an epoch has a round value.
        done = epoch + 1 / self.steps_per_epoch
        replicas = world.replicas()
        return (1 + (replicas - 1) * min(1.0, done / self.warmup_epochs)) / replicas

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.warmup_epochs and world.rank() == 0:
            print(f"\nEpoch {epoch + 1}: learning rate warm-up finished at {self._rate():g}.")
