"""`MetricAverageCallback`: logs that are those of the global data, in a loop of one's own.

`fit()` does it by itself, exactly, and before any callback reads the logs. Horovod's scripts name this callback,
and loops that call callbacks themselves need it.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdist import fit_hook, metric_merging, world
from tfdist.process_sets import ProcessSet, global_process_set


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces values in the epoch's logs by those of all ranks' data; all ranks must use it.

    In `fit()` it has nothing left to do: there, logs are global already when the first callback reads them. In a
    loop of your own, `callback.on_epoch_end(epoch, logs)` changes `logs` in place: values of the model's metrics
    come from the sum of the ranks' states, which is exact; others are the mean of the ranks' values, weighted by
    the samples that each rank's loss tracker has counted. A rank without data gets the values of the others; what
    only some ranks with data have stays as it is.

    A metric of your own is exact, too, if its class says `tfdist_state = "sum"`: all its variables are sums over
    samples. So is one that keeps its state in metrics of Keras. Losses of single outputs, which Keras takes as
    means over batches rather than samples, are exact where batches are equal.

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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        control = world.current().control
        if control is None or not logs or fit_hook.merges_logs(self.model):
            return
        answers = control.exchange(
            f"MetricAverageCallback on ranks {self.process_set.ranks}",
            metric_merging.measure(self.model, logs).to_payload(),
            ranks=self.process_set.ranks,
            check=f"epoch {epoch + 1}",
            describe="MetricAverageCallback",
        )
        metric_merging.merge_into(logs, self.model, answers)
