"""`BestModelCheckpoint`: the best model of all epochs in a file that is always whole.

Stock `ModelCheckpoint` is safe in `fit()` of a world of several ranks, where tfdist makes Keras's saves atomic.
This one is so everywhere, in one process and in loops of one's own, too. Horovod has the name; there, the path is
an attribute that its Spark estimators set.
"""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdist import world
from tfdist.callback_roles import runs_on_first_rank_only
from tfdist.keras_compat import atomic_saves
from tfdist.optimizer import divides_state, is_distributed, ranks_of


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Writes the model whenever the monitored value is the best so far; all ranks use it, the first one writes.

    The file is written beside its place and renamed into it: whoever reads it, and whenever the process is killed,
    finds a whole model, the best so far or the best before. The other ranks wait for the write at the end of the
    epoch, no longer than the world's timeout; if it fails, `fit()` raises on all of them.

    Args:
        filepath: ends in `.keras` or `.h5`, or with `save_weights_only` in `.weights.h5`; may contain
            `{epoch:02d}` and names in the logs. As in Horovod, it may be set later, as the attribute `filepath`.
        monitor: name in the logs.
        verbose: 1 prints a line per decision, on the rank that writes.
        mode: `min`, `max`, or `auto`, by the name of what is monitored.
        save_freq: `"epoch"`, or a number of batches. Between epochs, logs are those of one rank's data.
        save_weights_only: whether to leave out the model's configuration.
        initial_value_threshold: value to improve upon at first.

    Raises:
        ValueError: the suffix, `mode` or `save_freq` is none of those above, or training begins without `filepath`.

    Example:
        >>> import keras, numpy as np, pathlib, tempfile, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(tfdist.DistributedOptimizer("sgd"), "mse")
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "best.keras"
        >>> best = tfdist.callbacks.BestModelCheckpoint(file, monitor="loss")
        >>> _ = model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[best], verbose=0)
        >>> keras.models.load_model(file).count_params()
        3
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str] | None = None,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        save_weights_only: bool = False,
        initial_value_threshold: float | None = None,
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"`mode` must be 'auto', 'min' or 'max'. Received: {mode!r}.")
        super().__init__(
            filepath if filepath is not None else _any_path(save_weights_only),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no path to write to. Give it one, "
                'BestModelCheckpoint("best.keras", ...), or set its attribute `filepath`.'
            )
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writes():
            with atomic_saves(self.model):
                super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writes():
            with atomic_saves(self.model):
                super().on_epoch_end(epoch, logs)

    def _writes(self) -> bool:
        """In `fit()` other ranks don't even call it; in a loop of one's own they may."""
        optimizer = self.model.optimizer
        if not runs_on_first_rank_only(self) or optimizer is None or not is_distributed(optimizer):
            return True
        if divides_state(optimizer):
            return True  # `model.save` knows which rank writes
        return world.rank() == ranks_of(optimizer)[0]


def _any_path(weights_only: bool) -> str:
    return ".weights.h5" if weights_only else ".keras"
