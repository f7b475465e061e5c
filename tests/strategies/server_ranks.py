"""What each rank runs in the tests of the parameter server."""

from __future__ import annotations

from typing import Any

import numpy as np

import tfdist
from tests.distributed import bodies, models
from tfdist import keras_compat
from tfdist.bench.sent_bytes import bytes_sent


def trained(strategy: str, folder: str, policy: str, epochs: int) -> dict[str, Any]:
    """Trains with every callback that saves; returns the state, and that of what plain Keras loads."""
    import keras

    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    try:
        model = models.dense()
    finally:
        keras.config.set_dtype_policy("float32")
    with bodies.under(strategy):
        optimizer = bodies.wrap(keras.optimizers.Adam(0.01))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = models.data("dense")
    before = bodies.weights_of(model)
    history = model.fit(
        bodies.share(x), bodies.share(y), batch_size=models.GLOBAL_BATCH // tfdist.size(), shuffle=False,
        epochs=epochs, verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(f"{folder}/last.keras"),
            keras.callbacks.ModelCheckpoint(f"{folder}/often.keras", save_freq=2),
            tfdist.callbacks.BestModelCheckpoint(f"{folder}/best.keras", monitor="loss"),
            keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False),
            tfdist.callbacks.BroadcastGlobalVariablesCallback(0),
            tfdist.callbacks.DesyncCheckCallback(2),
        ],
    )  # fmt: skip
    model.save(f"{folder}/by_hand.keras")
    result = bodies.outcome(model, before) | {"epochs": len(history.epoch)}
    for name in ("last", "best", "by_hand"):
        loaded = keras.models.load_model(f"{folder}/{name}.keras")
        result[name] = bodies.weights_of(loaded) + [np.asarray(each) for each in loaded.optimizer.variables]
    load = keras.models.load_model if tfdist.size() == 1 else tfdist.load_model
    with bodies.under(strategy):
        loaded = load(f"{folder}/last.keras")
    result["loaded again"] = bodies.outcome(loaded, before)["slots"]
    loaded.fit(
        bodies.share(x),
        bodies.share(y),
        batch_size=models.GLOBAL_BATCH // tfdist.size(),
        shuffle=False,
        verbose=0,
    )
    return result | {"trained on": bodies.outcome(loaded, before)}


def with_dedicated_servers(strategy: str, batch: int) -> dict[str, Any]:
    """Trains, validates and evaluates on shards of which servers get nothing."""
    import keras

    keras.utils.set_random_seed(3)
    model = models.dense()
    x, y = models.data("dense")
    with bodies.under(strategy):
        model.compile(
            bodies.wrap(keras.optimizers.Adam(0.01, global_clipnorm=0.1)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        before = bodies.weights_of(model)
        replicas = tfdist.replicas()
        history = model.fit(
            tfdist.shard((x, y), batch_size=batch // replicas, shuffle=False),
            validation_data=tfdist.shard((x[:50], y[:50]), batch_size=10, shuffle=False),
            epochs=3,
            verbose=0,
            callbacks=tfdist.callbacks.default(),
        ).history
        evaluated = model.evaluate(
            tfdist.shard((x, y), batch_size=7, shuffle=False), verbose=0, return_dict=True
        )
    result = bodies.outcome(model, before)
    return result | {"history": history, "evaluated": evaluated, "replicas": replicas}  # fmt: skip


def slot_bytes(strategy: str) -> tuple[int, int]:
    """Bytes of slots that this rank keeps, and of all its optimizer's variables."""
    import keras

    model = keras.Sequential([keras.Input((256,)), *(keras.layers.Dense(256) for _ in range(4))])
    with bodies.under(strategy):
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam())
    optimizer.build(model.trainable_variables)
    sizes = [
        (keras_compat.kept_here(each), np.asarray(each).nbytes)
        for each in optimizer.variables
    ]  # fmt: skip
    return sum(size for here, size in sizes if here), sum(size for _, size in sizes)


def bytes_of_a_step(strategy: str, kilobytes: int) -> float:
    """Bytes that this rank sends in one update of so many kilobytes of weights in four variables."""
    import keras
    import tensorflow as tf

    weights = [keras.Variable(np.zeros(kilobytes * 64, "float32")) for _ in range(4)]
    with bodies.under(strategy):
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(weights)
    gradients = [tf.ones(weight.shape) for weight in weights]
    step = tf.function(lambda: optimizer.apply(gradients, weights), autograph=False)
    step()
    tfdist.barrier()
    before = bytes_sent()
    for _ in range(4):
        step()
    tfdist.barrier()
    return (bytes_sent() - before) / 4


def refusals(strategy: str) -> list[str]:
    """What needs all gradients, or all values, on all ranks."""
    import keras
    import tensorflow as tf

    said = []
    for use in (
        lambda: tfdist.DistributedOptimizer("sgd", op=tfdist.Adasum),
        lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD()).register_local_var(tf.Variable(0.0)),
    ):
        with bodies.under(strategy):
            try:
                use()
                said.append("nothing")
            except tfdist.TfdistError as error:
                said.append(str(error))
    return said


def save_alone(strategy: str, path: str) -> str:
    """Only rank 0 saves what all keep a part of."""
    import keras

    model = models.dense()
    with bodies.under(strategy):
        model.compile(tfdist.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.optimizer.build(model.trainable_variables)
    if tfdist.rank() == 0:
        model.save(path)
    return "saved"
