"""`MetricAverageCallback`: logs at the end of an epoch are those of the global data, on every rank.

A rank's `fit()` measures its own part of the data. An average of the ranks' averages is wrong as soon as
parts differ in size, so values are weighted by the samples that each rank saw, which for means over samples
(losses, accuracies, errors) is exact. Keras counts samples itself: the `count` of the model's loss tracker.

The numbers are few and small, so they travel over the control channel as 64-bit floats: no tensor is moved,
and no collective can be left waiting for a metric that only one rank has.
"""

from __future__ import annotations

import numbers
from typing import Any

import keras

from tfdist import world
from tfdist.process_sets import ProcessSet, global_process_set


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces values in the epoch's logs by their mean over all ranks' samples; all ranks must use it.

    Training values are weighted by the training samples, values that begin with "val_" by the validation
    samples of each rank. The logs are changed in place: callbacks after it in the list, History and the
    progress bar see averaged values. So place it before `ReduceLROnPlateau`, `EarlyStopping` and
    `ModelCheckpoint`. Values that only some ranks have stay as they are.

    Exact for means over samples. Metrics with other state (AUC, precision, recall, IoU) and weighted means
    are approximated by the mean of the ranks' values.

    Args:
        device: kept for Horovod's signature; no tensors are moved.
        process_set: the ranks to average over; all by default.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(tfdist.DistributedOptimizer("sgd"), "mse")
        >>> average = tfdist.callbacks.MetricAverageCallback()
        >>> _ = model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[average], verbose=0)
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.device = device
        self.process_set = process_set
        self._train_samples: float | None = None
        self._validation_samples: float | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._train_samples = self._validation_samples = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation resets the counter that training used.
        if self._train_samples is None:
            self._train_samples = self._samples()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._validation_samples is None:
            self._validation_samples = self._samples()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        control = world.current().control
        if control is None or not logs:
            return
        values = {name: float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
        mine = {
            "train": self._samples() if self._train_samples is None else self._train_samples,
            "validation": self._validation_samples or 0.0,
            "values": values,
        }
        everyones = control.exchange(
            f"MetricAverageCallback on ranks {self.process_set.ranks}",
            mine,
            ranks=self.process_set.ranks,
            check=f"epoch {epoch + 1}",
            describe="MetricAverageCallback",
        )
        for name in values:
            if all(name in rank["values"] for rank in everyones):
                part = "validation" if name.startswith("val_") else "train"
                logs[name] = _mean([(rank["values"][name], rank[part]) for rank in everyones])

    def _samples(self) -> float:
        """Samples that this rank's metrics cover; 0 for a `train_step` that does not use the loss tracker."""
        tracker = getattr(self.model, "_loss_tracker", None)
        return 0.0 if tracker is None else float(keras.ops.convert_to_numpy(tracker.count))


def _mean(weighted: list[tuple[float, float]]) -> float:
    """Mean of (value, weight) pairs; unweighted if no rank knows how many samples it saw."""
    if len({value for value, _ in weighted}) == 1:
        return weighted[0][0]  # a learning rate, say: no rounding
    total = sum(weight for _, weight in weighted)
    if total == 0:
        return sum(value for value, _ in weighted) / len(weighted)
    # A rank without samples has no meaningful value (0 or NaN), whatever its weight.
    return sum(value * weight for value, weight in weighted if weight) / total
