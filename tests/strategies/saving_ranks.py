"""What each rank runs where a rank fails while the others save with it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import tfdist
from tests.distributed import bodies, models


def failing_before_a_save(strategy: str, folder: str) -> tuple[str, str, float, str]:
    """The last rank fails just before all save; then all train again.

    Returns:
        Class and text of the error, seconds of `fit()`, and digest of the weights afterwards.
    """
    import keras

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and tfdist.rank() == tfdist.size() - 1:
                raise ValueError("my callback broke")

    keras.utils.set_random_seed(3)
    model = models.dense()
    with bodies.under(strategy):
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = models.data("dense")

    def fit(*callbacks: Any) -> None:
        saving = keras.callbacks.ModelCheckpoint(f"{folder}/sub/often.keras", save_freq=2)
        batch = models.GLOBAL_BATCH // tfdist.size()
        model.fit(
            bodies.share(x), bodies.share(y), batch_size=batch, verbose=0, callbacks=[*callbacks, saving]
        )

    start, kind, text = time.monotonic(), "nothing", ""
    try:
        fit(Failing())
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    fit()
    return kind, text, seconds, bodies.digest([np.asarray(each) for each in model.get_weights()])
