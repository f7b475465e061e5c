"""One rank of each contender of `tfdist bench asynchronous`: the same model and batches, trained in its way.

`fit` and `loop` share one world, its servers and its workers: `fit()` under `async_parameter_server`, and the loop
that TensorFlow's guide to `ParameterServerStrategy` teaches. The loop as taught loses updates; a lock on the server
around each update makes it count right, as `fit` does. `ring` is a world of its own, of as many ranks as there are
workers.

What a worker computes beside the small model is waiting, for as long as a file in its folder says: processes that
share the cores of one machine can't be made slow one by one, machines of a cluster are.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.bench.fit_ranks import MODELS
from tfdist.bench.ranks import Channel

PACE = "pace"  # file in a rank's folder: microseconds that a step waits
_SERVER = "/job:ps/replica:0/task:0/device:CPU:0"


def main(channel: Channel, options: dict[str, Any]) -> None:
    """Prepares the contender `options["contender"]` and trains on request.

    Args:
        channel: to the measuring process.
        options: contender, model (a key of `MODELS`), batch, steps, and the folder of the ranks' folders.
    """
    folder = pathlib.Path(options["folder"], options["contender"], str(channel.rank))
    folder.mkdir(parents=True)
    (folder / PACE).write_text("0")
    os.chdir(folder)
    if options["contender"] == "ring":
        _answer(channel, options, {"ring": _ring(options)})
        return
    import tfdist

    if channel.rank > 0:
        channel.ready()
        tfdist.init()  # serves until this process is ended
        return
    tfdist.init()
    _answer(channel, options, {"fit": _fit(options), "loop": _loop(options)})


def _answer(channel: Channel, options: dict[str, Any], contenders: dict[str, Callable[[int], float]]) -> None:
    """Serves requests for a number of steps of a contender."""
    for train in contenders.values():
        train(options["steps"])  # traced, and held by the workers, before anything is timed
    channel.ready()
    for request in channel.requests():
        began = time.perf_counter()
        counted = contenders[request["who"]](request["steps"])
        assert counted == request["steps"], f"{counted} of {request['steps']} updates counted"
        channel.answer(time.perf_counter() - began)


def _paced(model: Any) -> Any:
    """The model behind a layer that waits, in TensorFlow alone: a worker runs no Python."""
    import keras
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    class Pace(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            # Of a constant name TensorFlow would read the file once, and keep what it says.
            name = tf.strings.substr(PACE, 0, tf.shape(x)[0] + len(PACE))
            wait = tf.strings.to_number(tf.io.read_file(name), tf.int64)
            # It sleeps before it finds out that there is no element.
            waited = (
                tf.data.Dataset.range(0, output_type=tf.int64)
                .apply(sleep(wait))
                .reduce(tf.constant(0, tf.int64), lambda total, each: total + each)
            )
            with tf.control_dependencies([waited]):
                return tf.identity(x)

    return keras.Sequential([keras.Input((784,)), Pace(), *model.layers])


def _arrays(options: dict[str, Any], batches: int) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    rows = batches * options["batch"]
    return random.random((rows, 784), dtype=np.float32), random.integers(0, 10, rows)


def _compiled(options: dict[str, Any]) -> Any:
    import keras

    import tfdist

    keras.utils.set_random_seed(1)
    with tfdist.scope():
        model = _paced(MODELS[options["model"]](keras))
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-4)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def _ring(options: dict[str, Any]) -> Callable[[int], float]:
    import tfdist

    tfdist.init()
    return _fit(options)


def _fit(options: dict[str, Any]) -> Callable[[int], float]:
    import tfdist

    model = _compiled(options)
    # An epoch of so many steps; the ring's step takes a batch for every rank.
    ranks = tfdist.replicas() if options["contender"] == "ring" else 1
    shard = tfdist.shard(_arrays(options, options["steps"] * ranks), batch_size=options["batch"])

    def train(steps: int) -> float:
        before = int(model.optimizer.iterations.numpy())
        model.fit(shard, verbose=0, shuffle=False)
        return int(model.optimizer.iterations.numpy()) - before

    return train


def _loop(options: dict[str, Any]) -> Callable[[int], float]:
    """The hand-written loop: each worker has the data, and nothing but a function's name is sent to it."""
    import keras
    import tensorflow as tf

    from tfdist.strategies import placed

    strategy = placed.distribution()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = _paced(MODELS[options["model"]](keras))
        optimizer = keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
        total = tf.Variable(0.0)
    with tf.device(_SERVER):
        mutex = tf.raw_ops.MutexV2(shared_name="bench")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = model.trainable_variables

    def replica(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, weights)
        with tf.device(_SERVER):
            gradients = [tf.identity(gradient) for gradient in gradients]
            with tf.control_dependencies(gradients):
                lock = tf.raw_ops.MutexLock(mutex=mutex)
            with tf.control_dependencies([lock]):
                optimizer.apply([tf.identity(gradient) for gradient in gradients], weights)
                total.assign_add(value)
                updated = [each.value.read_value() for each in [*weights, *optimizer.variables]]
            with tf.control_dependencies([*updated, total.read_value()]):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        return value

    def run(iterator: Any) -> Any:
        return strategy.run(replica, args=(next(iterator),))

    step = tf.function(run, autograph=False)

    dataset = (
        tf.data.Dataset.from_tensor_slices(_arrays(options, 16)).batch(options["batch"]).cache().repeat()
    )
    iterator = iter(coordinator.create_per_worker_dataset(dataset.prefetch(2)))

    def train(steps: int) -> float:
        before = int(optimizer.iterations.numpy())
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        total.numpy()
        return int(optimizer.iterations.numpy()) - before

    return train
