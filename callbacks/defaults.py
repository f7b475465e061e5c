"""`default`: the callbacks that most trainings want, in one call."""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdist.callbacks.best_model_checkpoint import BestModelCheckpoint
from tfdist.callbacks.broadcast_global_variables import BroadcastGlobalVariablesCallback
from tfdist.callbacks.desync_check import DesyncCheckCallback
from tfdist.callbacks.learning_rate_warmup import LearningRateWarmupCallback


def default(
    *,
    root_rank: int = 0,
    initial_lr: float | None = None,
    warmup_epochs: float = 0,
    best: str | os.PathLike[str] | None = None,
    monitor: str = "val_loss",
    resume: str | os.PathLike[str] | None = None,
    check_every: int = 100,
) -> list[Any]:
    """Callbacks for `fit()`: equal start and a check that ranks stay equal; warm-up, checkpoints on request.

    Args:
        root_rank: the rank whose weights and optimizer state all start from.
        initial_lr: the learning rate after warm-up; needed for `warmup_epochs`.
        warmup_epochs: epochs in which the rate grows from `initial_lr / size()`; 0 for none.
        best: file for the best model, written by rank 0 (`BestModelCheckpoint`).
        monitor: the value by which it is best.
        resume: folder for `keras.callbacks.BackupAndRestore`: a job that was killed and starts again goes on
            where it was. Only rank 0 reads and writes it.
        check_every: steps between checks that all ranks hold the same state; 0 for none.

    Returns:
        A new list, to which others may be added.

    Raises:
        ValueError: `warmup_epochs` without `initial_lr`.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> callbacks = tfdist.callbacks.default(initial_lr=0.1 * tfdist.size(), warmup_epochs=3)
    """
    chosen: list[Any] = [BroadcastGlobalVariablesCallback(root_rank)]
    if warmup_epochs:
        if initial_lr is None:
            raise ValueError(
                f"default(warmup_epochs={warmup_epochs}) needs `initial_lr`, the learning rate after warm-up: the "
                "rate of your optimizer."
            )
        chosen.append(LearningRateWarmupCallback(initial_lr, warmup_epochs))
    if check_every:
        chosen.append(DesyncCheckCallback(check_every))
    if best is not None:
        chosen.append(BestModelCheckpoint(best, monitor=monitor))
    if resume is not None:
        chosen.append(keras.callbacks.BackupAndRestore(resume))
    return chosen
