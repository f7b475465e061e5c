"""Faults of plain Keras under `tf.distribute`, each shown by a function that runs with tfdist's patches removed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.distributed import models
from tfdist import keras_compat
from tfdist.placed_hook import PlacedHook
from tfdist.strategies import placed


@contextlib.contextmanager
def unpatched() -> Iterator[Any]:
    """Plain Keras; yields the world's `tf.distribute.Strategy`."""
    keras_compat.uninstall()
    try:
        yield placed.distribution()
    finally:
        keras_compat.install_for_replicas(PlacedHook())


def fit(rows: int = 64, *, epochs: int = 1, optimizer: Any = None, layers: Any = (), **options: Any) -> Any:
    """A model trained by plain Keras in the world's strategy."""
    import keras

    x, y = models.data("dense")
    with unpatched() as strategy:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(4), *layers, keras.layers.Dense(3)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.5), loss, **options)
        model.fit(x[:rows], y[:rows], batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def said(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_devices() -> dict[str, Any]:
    """What happens in one process with two devices."""
    import keras
    import tensorflow as tf

    found: dict[str, Any] = {}
    weights = [np.asarray(weight) for weight in fit(rows=51).get_weights()]
    x, y = models.data("dense")
    with unpatched():
        keras.utils.set_random_seed(3)
        alone = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)])
        alone.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        alone.fit(x[:51], y[:51], batch_size=16, shuffle=False, verbose=0)
    found["ragged"] = max(
        float(np.abs(a - b).max()) for a, b in zip(weights, alone.get_weights(), strict=True)
    )
    normalized = fit(layers=[keras.layers.BatchNormalization()])
    first, second = (copy.numpy() for copy in normalized.layers[1].moving_mean.value.values)
    found["statistics"] = float(np.abs(first - second).max())
    found["accumulation"] = said(
        lambda: fit(optimizer=lambda: keras.optimizers.SGD(gradient_accumulation_steps=2))
    )
    with unpatched() as strategy:
        with strategy.scope():
            seeds = keras.random.SeedGenerator(3)
            counter = keras.Variable(0, dtype="int32", aggregation="only_first_replica")
        found["number"] = said(lambda: int(counter))
        drawn = strategy.run(seeds.next)
        one, other = (seed.numpy() for seed in strategy.experimental_local_results(drawn))
        found["seeds"] = bool((one == other).all())
        central = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0")
        with central.scope():
            total = keras.Variable(1.0, trainable=False, aggregation="sum")
        central.run(lambda: total.assign_add(1.0))
        found["added"] = float(np.asarray(total))
    return found


def between_workers() -> dict[str, str]:
    """What happens between two workers."""
    from keras.src.backend.tensorflow import trainer

    found = {"built": said(fit)}
    with unpatched() as strategy:
        value = strategy.run(lambda: __import__("tensorflow").constant(1.0))
        found["reduced"] = said(lambda: trainer.reduce_per_replica(value, strategy, "auto"))
    return found
