"""One rank of each contender of `tfdist bench fit`: the same model, data and optimizer, trained in its way.

Every contender trains in blocks of `steps` steps, of `fit()` or of a hand-written loop. It waits for a request
before each block and answers with the block's seconds. The loss is read at the end of each, so nothing is left
under way; its mean is tracked in all of them, since `fit()` does it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.bench import peers
from tfdist.bench.ranks import Channel

LEARNING_RATE = 0.01
_BATCHES = 16  # different batches, repeated: enough that none stays in a cache


def main(channel: Channel, options: dict[str, Any]) -> None:
    """Prepares the contender `options["contender"]` and trains on request.

    Args:
        channel: to the measuring process.
        options: contender, model (a key of `MODELS`), np, batch, steps.
    """
    _CONTENDERS[options["contender"]](channel, options)


# --- models, for Keras 3 and for Keras 2 ---


def _mlp(keras: Any) -> Any:
    """1.9 million weights, 7.5 MB of gradients: much to move for little to compute."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def _convnet(keras: Any) -> Any:
    """0.1 million weights: little to move for much to compute."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


MODELS: dict[str, Callable[[Any], Any]] = {"mlp": _mlp, "convnet": _convnet}


def _dataset(rank: int, options: dict[str, Any]) -> Any:
    """Endless batches; every rank has data of its own."""
    import tensorflow as tf

    random = np.random.default_rng(rank)
    samples = _BATCHES * options["batch"]
    images = random.random((samples, 784), dtype=np.float32)
    labels = random.integers(0, 10, samples)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(
        options["batch"], drop_remainder=True
    )
    return dataset.cache().repeat().prefetch(2)


def _model(keras: Any, options: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(1)  # equal weights on all ranks, so that nothing needs to be broadcast
    return MODELS[options["model"]](keras)


def _compile(keras: Any, model: Any, optimizer: Any) -> None:
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def _fingerprint(model: Any) -> str:
    """Equal on two ranks exactly if all their weights are."""
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()


class _Clock:
    """Time since it was made: of the wall, and of the processor in all threads of this process."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._wall,
            "cpu": time.process_time() - self._processor,
        }


# --- fit() ---


def _fit(
    keras: Any,
    model: Any,
    dataset: Any,
    channel: Channel,
    options: dict[str, Any],
    callbacks: Sequence[Any] = (),
) -> None:
    """Trains in one endless epoch of `fit()`, a block of steps per request; the first is for warming up."""

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.clock, self.steps, self.prepared = _Clock(), 0, False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps % options["steps"]:
                return
            float(logs["loss"])
            times = self.clock.read()
            if self.prepared:
                channel.answer({**times, "weights": _fingerprint(self.model)})
            else:
                self.prepared = True
                channel.ready()
            if channel.next_request() is None:
                os._exit(0)
            self.clock = _Clock()

    endless = 1_000_000_000
    model.fit(dataset, steps_per_epoch=endless, verbose=0, callbacks=[*callbacks, Turns()])


def _alone(channel: Channel, options: dict[str, Any]) -> None:
    """Plain Keras 3 in one process."""
    import keras

    model = _model(keras, options)
    _compile(keras, model, keras.optimizers.SGD(LEARNING_RATE))
    _fit(keras, model, _dataset(0, options), channel, options)


def _tfdist(channel: Channel, options: dict[str, Any]) -> None:
    """What tfdist's users write; the engine is the environment's."""
    import keras

    import tfdist

    tfdist.init()
    if tfdist.backend() != options["backend"]:
        raise RuntimeError(f"tfdist chose the engine {tfdist.backend()!r}, not {options['backend']!r}.")
    model = _model(keras, options)
    wrapped = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(LEARNING_RATE), **options.get("optimizer_options", {})
    )
    _compile(keras, model, wrapped)
    callbacks = _tfdist_callbacks(options["contender"])
    _fit(keras, model, _dataset(channel.rank, options), channel, options, callbacks)


def _tfdist_callbacks(contender: str) -> list[Any]:
    from tfdist.callbacks import DesyncCheckCallback, default

    chosen: list[Any] = []
    if contender == "desync-check":
        chosen = [DesyncCheckCallback(100)]
    elif contender == "callbacks":
        # The one epoch never ends: no file is written, and the warm-up acts in every step.
        folder = f"{tempfile.gettempdir()}/tfdist-bench-{os.getpid()}"
        chosen = default(
            initial_lr=LEARNING_RATE,
            warmup_epochs=1000,
            best=f"{folder}/best.keras",
            monitor="loss",
            resume=f"{folder}/backup",
        )
    return chosen


def _horovod_in_apply(channel: Channel, options: dict[str, Any]) -> None:
    """The shortest optimizer that reduces in Keras 3's `fit()`: what `fit()` itself costs, without tfdist."""
    hvd = peers.start_horovod(channel, size=options["np"])
    import keras

    class Reducing(keras.optimizers.SGD):  # type: ignore[misc]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply(hvd.grouped_allreduce(list(grads), op=hvd.Average), trainable_variables)

    model = _model(keras, options)
    _compile(keras, model, Reducing(LEARNING_RATE))
    _fit(keras, model, _dataset(channel.rank, options), channel, options)


def _horovod_legacy(channel: Channel, options: dict[str, Any]) -> None:
    """Horovod's own wrapper, on the last Keras with which it reduces."""
    peers.start_horovod(channel, size=options["np"])
    import horovod.tensorflow.keras as hvd
    import tf_keras

    model = _model(tf_keras, options)
    _compile(tf_keras, model, hvd.DistributedOptimizer(tf_keras.optimizers.SGD(LEARNING_RATE)))
    _fit(tf_keras, model, _dataset(channel.rank, options), channel, options)


def _mwms_legacy(channel: Channel, options: dict[str, Any]) -> None:
    """TensorFlow's own strategy, on the last Keras with which it trains."""
    strategy = peers.start_multi_worker(channel)
    import tf_keras

    with strategy.scope():
        model = _model(tf_keras, options)
        _compile(tf_keras, model, tf_keras.optimizers.SGD(LEARNING_RATE))
    _fit(tf_keras, model, _data_of_replicas(strategy, channel, options), channel, options)


# --- strategies of tf.distribute ---


def _tfdist_placed(channel: Channel, options: dict[str, Any]) -> None:
    """What tfdist's users write where replicas are devices, of one process or of each."""
    import keras
    import tensorflow as tf

    import tfdist

    tfdist.init()
    with tfdist.scope():
        model = _model(keras, options)
        _compile(keras, model, tfdist.DistributedOptimizer(keras.optimizers.SGD(LEARNING_RATE)))
        strategy = tf.distribute.get_strategy()
    _fit(keras, model, _data_of_replicas(strategy, channel, options), channel, options)


def _legacy_devices(channel: Channel, options: dict[str, Any]) -> None:
    """The strategies of one process, on the last Keras for which they were made."""
    import tensorflow as tf
    import tf_keras

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options["np"])
    names = [f"CPU:{number}" for number in range(options["np"])]
    strategy = (
        tf.distribute.MirroredStrategy(names)
        if options["contender"] == "mirrored-legacy"
        else tf.distribute.experimental.CentralStorageStrategy(names, names[0])
    )
    with strategy.scope():
        model = _model(tf_keras, options)
        _compile(tf_keras, model, tf_keras.optimizers.SGD(LEARNING_RATE))
    _fit(tf_keras, model, _data_of_replicas(strategy, channel, options), channel, options)


def _data_of_replicas(strategy: Any, channel: Channel, options: dict[str, Any]) -> Any:
    """Data of its own for each worker, without reading what others take: the fastest way of all."""
    if strategy.extended._in_multi_worker_mode():
        return strategy.distribute_datasets_from_function(lambda _: _dataset(channel.rank, options))
    return _dataset(0, {**options, "batch": options["batch"] * options["np"]})


# --- by hand ---


def _by_hand(channel: Channel, options: dict[str, Any]) -> None:
    """A loop without `fit()` around Horovod's own operation: the fastest a user would write by hand."""
    hvd = peers.start_horovod(channel, size=options["np"])
    import keras
    import tensorflow as tf

    model = _model(keras, options)
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean = keras.metrics.Mean()
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> None:
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, variables)
        gradients = hvd.grouped_allreduce(gradients, op=hvd.Average)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(loss)

    iterator = iter(_dataset(channel.rank, options))

    def block() -> dict[str, float]:
        clock = _Clock()
        mean.reset_state()
        for _ in range(options["steps"]):
            step(iterator)
        float(mean.result())
        return clock.read()

    block()
    channel.ready()
    for _ in channel.requests():
        channel.answer({**block(), "weights": _fingerprint(model)})


_CONTENDERS: dict[str, Callable[[Channel, dict[str, Any]], None]] = {
    "alone": _alone,
    "by-hand": _by_hand,
    "horovod-in-apply": _horovod_in_apply,
    "tfdist-horovod": _tfdist,
    "callbacks": _tfdist,
    "desync-check": _tfdist,
    "horovod-legacy": _horovod_legacy,
    "tfdist-tf": _tfdist,
    "mwms-legacy": _mwms_legacy,
    "servers-horovod": _tfdist,
    "servers-tf": _tfdist,
    "multi_worker_mirrored": _tfdist_placed,
    "mirrored": _tfdist_placed,
    "central_storage": _tfdist_placed,
    "mirrored-legacy": _legacy_devices,
    "central_storage-legacy": _legacy_devices,
}
