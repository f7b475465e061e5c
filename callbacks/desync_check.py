"""`DesyncCheckCallback`: finds ranks that have drifted apart while training goes on.

Ranks that apply the same updates to the same weights stay equal to the last bit. When they don't (weights changed
on one rank, an operation that is not deterministic, faulty memory), nothing else notices: the loss only gets a
little worse. So now and then each rank sums up the bits of its state on its device, and the sums are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import fit_hook, world
from tfdist.errors import OutOfSyncError
from tfdist.optimizer import ranks_of
from tfdist.variables import MOVING_STATISTICS, path_of

_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int32}  # bytes of an element -> what its bits are read as


class DesyncCheckCallback(keras.callbacks.Callback):
    """Compares weights, optimizer slots and iterations of all ranks every `every_n_steps` steps of `fit()`.

    All ranks must use it. A check reads the state once, on the device that holds it, and sends 16 bytes per
    variable. With one rank it does nothing.

    Args:
        every_n_steps: steps between checks, counted over epochs.
        ignore: last path components of weights that may differ, by default the moving statistics of
            BatchNormalization, which follow each rank's own data. `()` with `SyncBatchNormalization`.

    Raises:
        OutOfSyncError: during `fit()`, on all ranks; names variable, ranks, step and usual causes.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(tfdist.DistributedOptimizer("sgd"), "mse")
        >>> check = tfdist.callbacks.DesyncCheckCallback(every_n_steps=100)
        >>> _ = model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[check], verbose=0)
    """

    def __init__(self, every_n_steps: int = 100, *, ignore: Sequence[str] = MOVING_STATISTICS) -> None:
        super().__init__()
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be an integer >= 1. Received: {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self.ignore = tuple(ignore)
        self._finished_epochs = 0  # steps of the epochs that are over
        self._steps = 0
        self._checks = 0
        self._sums: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._finished_epochs = self._steps = self._checks = 0
        self._sums = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._finished_epochs = self._steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = self._finished_epochs + batch + 1
        if self._steps // self.every_n_steps > self._checks:
            self._checks = self._steps // self.every_n_steps
            self._check()

    def _check(self) -> None:
        control = world.current().control
        ranks = ranks_of(self.model.optimizer)
        if control is None or len(ranks) == 1:
            return
        variables = fit_hook.common_state(self.model, ignore=self.ignore)
        if self._sums is None:
            self._sums = tf.function(lambda: tf.stack([_sums(variable) for variable in variables]))
        mine = self._sums().numpy()
        answers = control.exchange(
            f"DesyncCheckCallback on ranks {ranks}",
            mine.tobytes(),
            ranks=ranks,
            check=f"step {self._steps}, {len(variables)} variables",
            describe="DesyncCheckCallback",
        )
        sums = np.stack([np.frombuffer(answer, mine.dtype).reshape(mine.shape) for answer in answers])
        differing = np.any(sums != sums[:1], axis=2)  # by rank and variable
        if differing.any():
            first = int(np.argmax(differing.any(axis=0)))
            there = [str(rank) for rank, differs in zip(ranks, differing[:, first], strict=True) if differs]
            raise OutOfSyncError(
                f"All ranks must hold the same weights and optimizer state, but after {self._steps} steps "
                f"{int(differing.any(axis=0).sum())} of {len(variables)} variables of model "
                f"{self.model.name!r} differ, first {path_of(variables[first])!r} on rank {', '.join(there)} "
                f"(compared with rank {ranks[0]}). Usual causes: a callback changed weights or the learning rate "
                "on one rank only, a train_step of your own updates some weights outside of the distributed "
                "optimizer, or an operation on one rank is not deterministic. Resume from the last checkpoint."
            )


def _sums(variable: Any) -> Any:
    """Two sums of a variable's bits, one of them weighted by position: int64, shape [2]."""
    value = tf.convert_to_tensor(getattr(variable, "value", variable))
    if value.dtype.is_bool or value.dtype.is_integer:
        bits = tf.cast(value, tf.int64)
    else:
        bits = tf.cast(tf.bitcast(value, _INTEGERS[value.dtype.size]), tf.int64)
    bits = tf.reshape(bits, [-1])
    # Both sums wrap around, and elements that exchange their places change the second one all the same.
    places = tf.range(tf.size(bits, out_type=tf.int64), dtype=tf.int64)
    return tf.stack([tf.reduce_sum(bits), tf.reduce_sum(bits * places)])
