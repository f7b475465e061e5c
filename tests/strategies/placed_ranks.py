"""What a rank runs in the tests of strategies that place replicas by `tf.distribute`.

Each function trains under the strategy, and beside it one process of plain Keras with the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tfdist
from tests.distributed import bodies, models

BATCH = 16


@contextlib.contextmanager
def under(strategy: str | None) -> Iterator[None]:
    """The world of this one process anew, with another strategy; None leaves it as it is."""
    if strategy is None:
        yield
        return
    tfdist.shutdown()
    tfdist.init(strategy=strategy)
    try:
        yield
    finally:
        tfdist.shutdown()
        tfdist.init()


def differences(strategy: str | None, case: dict[str, Any]) -> dict[str, Any]:
    """Trains one case; returns the largest differences from one process, and what shows that it trained."""
    import keras

    case = {"kind": "dense", "rows": 64, "passes": 1, "epochs": 2, "scaled": "", "compile": {}, **case}
    x, y = models.data(case["kind"], steps=4)
    x, y = x[: case["rows"]], y[: case["rows"]]

    def optimizer() -> Any:
        config = dict(case.get("config", {}))
        if "schedule" in case:
            config["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(case["schedule"], 2, 0.5)
        return bodies.optimizer_of(case["optimizer"], **config)

    def compiled(model: Any, made: Any, **options: Any) -> Any:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(made, loss, metrics=["accuracy"], **case["compile"], **options)
        return model

    def loss_scaled(made: Any, where: str) -> Any:
        if not where or case["scaled"] != where:
            return made
        return keras.optimizers.LossScaleOptimizer(made, initial_scale=2.0**7)

    with under(strategy):
        replicas = tfdist.replicas()
        keras.utils.set_random_seed(3)
        with tfdist.scope():
            model = models.MODELS[case["kind"]]()
            inner = loss_scaled(optimizer(), "inside")
            wrapped = tfdist.DistributedOptimizer(inner, backward_passes_per_step=case["passes"])
            compiled(model, loss_scaled(wrapped, "outside"))
        before = bodies.weights_of(model)
        size = BATCH // replicas // case["passes"]
        if case.get("raw"):
            data: Any = {"x": x, "y": y, "batch_size": BATCH}
        elif case.get("dataset"):
            import tensorflow as tf

            samples = tf.data.Dataset.from_tensor_slices((x, y))
            data = {"x": tfdist.shard(samples.batch(size), remainder="keep")}
        else:
            data = {"x": tfdist.shard((x, y), batch_size=size, shuffle=False, remainder="keep")}
        held_out = tfdist.shard((x[:23], y[:23]), batch_size=4, shuffle=False)
        trained = model.fit(
            **data, shuffle=False, epochs=case["epochs"], verbose=0, validation_data=held_out,
            callbacks=tfdist.callbacks.default() if case.get("callbacks") else [],
        ).history  # fmt: skip
        evaluated = tfdist.evaluate(model, held_out, verbose=0)
        predicted = tfdist.predict(model, x[:23], verbose=0)
        tfdist.check_in_sync(model)

        with tfdist.local():
            keras.utils.set_random_seed(3)
            alone = compiled(
                models.reference(case["kind"]), loss_scaled(optimizer(), case["scaled"]), jit_compile=False
            )
            alone.set_weights(before)
            alone.optimizer.build(alone.trainable_variables)
            expected = alone.fit(
                x, y, batch_size=BATCH, shuffle=False, epochs=case["epochs"], verbose=0,
                validation_data=(x[:23], y[:23]),
            ).history  # fmt: skip
            wanted = alone.predict(x[:23], verbose=0)
            measured = alone.evaluate(x[:23], y[:23], verbose=0, return_dict=True)
    after = bodies.weights_of(model)
    slots = [np.asarray(variable) for variable in model.optimizer.variables]
    others = [np.asarray(variable) for variable in alone.optimizer.variables]
    return {
        "weights": _apart(after, bodies.weights_of(alone)),
        "slots": _apart(slots, others),
        "logs": max(_apart([trained[name]], [expected[name]]) for name in expected),
        "evaluated": max(abs(evaluated[name] - measured[name]) for name in measured),
        "predicted": _apart([predicted], [wanted]),
        "iterations": (int(model.optimizer.iterations), int(alone.optimizer.iterations)),
        "moved": _apart(after, before),
        "digest": bodies.digest([*after, *slots]),
    }


def normalized(strategy: str | None) -> dict[str, Any]:
    """BatchNormalization, ragged: weights and statistics against replicas that a loop plays one after another."""
    import keras
    import tensorflow as tf

    x, y = models.data("dense", steps=4)
    x, y = x[:59], y[:59].astype("float32")[:, None]

    def network() -> Any:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="tanh"),
                layers.BatchNormalization(momentum=0.5),
                layers.Dense(1),
            ]
        )

    with under(strategy):
        replicas, ranks = tfdist.replicas(), tfdist.size()
        with tfdist.scope():
            model = network()
            model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        before = bodies.weights_of(model)
        shard = tfdist.shard((x, y), batch_size=BATCH // replicas, shuffle=False, remainder="keep")
        model.fit(shard, epochs=2, verbose=0, shuffle=False)
        predicted = model.predict(x, verbose=0)
        alone = network()
        alone.set_weights(before)
        optimizer = keras.optimizers.SGD(0.05)
        for start in [*range(0, len(x), BATCH)] * 2:
            rows = np.arange(start, min(start + BATCH, len(x)))
            parts = [
                part for own in np.array_split(rows, ranks) for part in np.array_split(own, replicas // ranks)
            ]
            old = [variable.numpy() for variable in alone.non_trainable_variables]
            statistics = [np.zeros_like(value) for value in old]
            gradients: list[Any] = [0.0] * len(alone.trainable_variables)
            for part in parts:
                for variable, value in zip(alone.non_trainable_variables, old, strict=True):
                    variable.assign(value)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((alone(x[part], training=True) - y[part]) ** 2) / len(rows)
                own = tape.gradient(loss, alone.trainable_variables)
                gradients = [total + each for total, each in zip(gradients, own, strict=True)]
                for total, variable in zip(statistics, alone.non_trainable_variables, strict=True):
                    total += variable.numpy() * len(part) / len(rows)
            for variable, value in zip(alone.non_trainable_variables, statistics, strict=True):
                variable.assign(value)
            optimizer.apply(gradients, alone.trainable_variables)
    after = bodies.weights_of(model)
    return {
        "weights": _apart(after, bodies.weights_of(alone)),
        "predicted": _apart([predicted], [np.asarray(alone(x))]),
        "moved": min(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)),
        "digest": bodies.digest(after),
    }


def normalized_together(strategy: str | None) -> dict[str, Any]:
    """SyncBatchNormalization, ragged: equal to BatchNormalization of one process."""
    import keras

    x, y = models.data("dense", steps=4)
    x, y = x[:59], y[:59]

    def compiled(layer: Any, optimizer: Any) -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8), layer(momentum=0.5), keras.layers.Dense(3)]
        )
        model.compile(
            optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
        )
        return model

    with under(strategy):
        with tfdist.scope():
            optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05))
            model = compiled(tfdist.SyncBatchNormalization, optimizer)
        before = bodies.weights_of(model)
        shard = tfdist.shard((x, y), batch_size=BATCH // tfdist.replicas(), shuffle=False, remainder="keep")
        model.fit(shard, epochs=2, verbose=0, shuffle=False)
        with tfdist.local():
            alone = compiled(keras.layers.BatchNormalization, keras.optimizers.SGD(0.05))
            alone.set_weights(before)
            alone.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    after = bodies.weights_of(model)
    return {
        "weights": _apart(after, bodies.weights_of(alone)),
        "moved": _apart(after, before),
        "digest": bodies.digest(after),
    }


def dropped(strategy: str) -> tuple[int, int]:
    """Different dropout masks among the replicas of one step, and replicas."""
    import keras
    import tensorflow as tf

    masks: list[bytes] = []

    class Watching(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            if isinstance(values, tf.Tensor) and hasattr(values, "numpy"):
                masks.append(values.numpy().tobytes())
            return values

    with under(strategy):
        replicas = tfdist.replicas()
        with tfdist.scope():
            model = keras.Sequential(
                [keras.Input((20,)), keras.layers.Dropout(0.5, seed=3), Watching(), keras.layers.Dense(1)]
            )
            model.compile(tfdist.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
        model.fit(
            tfdist.shard((np.ones((8, 20)), np.ones((8, 1))), batch_size=8 // replicas),
            verbose=0,
            shuffle=False,
        )
    return len(set(masks)), replicas


def saved(strategy: str | None, folder: str) -> dict[str, Any]:
    """Every callback that saves, early stopping, plain Keras's loading, and training on under the strategy."""
    import keras

    x, y = models.data("dense", steps=4)
    with under(strategy):
        batch = BATCH // tfdist.replicas()

        def data() -> Any:
            return tfdist.shard((x, y), batch_size=batch, shuffle=False)

        keras.utils.set_random_seed(3)
        with tfdist.scope():
            model = models.dense()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss)
        path = f"{folder}/best.keras"
        stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
        save = keras.callbacks.ModelCheckpoint(path)
        log = keras.callbacks.CSVLogger(f"{folder}/log.csv")
        callbacks = [
            *tfdist.callbacks.default(),
            tfdist.callbacks.DesyncCheckCallback(every_n_steps=2),
            stop,
            save,
            log,
        ]
        epochs = len(
            model.fit(data(), epochs=5, verbose=0, shuffle=False, callbacks=callbacks).history["loss"]
        )
        with tfdist.local():
            plain = keras.models.load_model(path)
        slots = [np.asarray(variable) for variable in model.optimizer.variables]
        loaded = [np.asarray(variable) for variable in plain.optimizer.variables]
        weights = _apart(bodies.weights_of(model), bodies.weights_of(plain))
        tfdist.barrier()
        with tfdist.scope():
            resumed = tfdist.load_model(path)
        for each in (model, resumed):
            each.fit(data(), epochs=1, verbose=0, shuffle=False)
        return {
            "epochs": epochs,
            "lines": len(Path(folder, "log.csv").read_text().splitlines()),
            "plain": type(plain.optimizer).__name__,
            "iterations": (int(plain.optimizer.iterations), int(resumed.optimizer.iterations)),
            "weights": weights,
            "slots": _apart(slots, loaded),
            "resumed": _apart(bodies.weights_of(model), bodies.weights_of(resumed)),
            "digest": bodies.digest(bodies.weights_of(resumed)),
        }


def refused(strategy: str | None) -> dict[str, str]:
    """What wrong uses are answered with."""
    import keras

    x, y = models.data("dense", steps=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    said: dict[str, str] = {}

    def attempt(name: str, function: Any) -> None:
        try:
            function()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def outside() -> None:
        model = models.dense()
        model.compile(tfdist.DistributedOptimizer("sgd"), loss)
        model.fit(x, y, verbose=0)

    def optimizer_outside() -> None:
        optimizer = tfdist.DistributedOptimizer("sgd")
        with tfdist.scope():
            model = models.dense()
            model.compile(optimizer, loss)
        model.fit(x, y, verbose=0)

    def plain() -> None:
        with tfdist.scope():
            model = models.dense()
            model.compile("sgd", loss)
        model.fit(x, y, verbose=0)

    def compiled() -> None:
        with tfdist.scope():
            model = models.dense()
            model.compile(tfdist.DistributedOptimizer("sgd"), loss, jit_compile=True)
        model.fit(x, y, verbose=0)

    def compressed() -> None:
        with tfdist.scope():
            tfdist.DistributedOptimizer("sgd", compression=tfdist.Compression.fp16)

    def taped() -> None:
        import tensorflow as tf

        tfdist.DistributedGradientTape(tf.GradientTape())

    with under(strategy):
        for attempted in (outside, optimizer_outside, plain, compiled, compressed, taped):
            attempt(attempted.__name__, attempted)
        with tfdist.local():
            attempt("alone", lambda: models.dense().compile("sgd", loss))
    return said


def lone(call: str) -> str:
    """Rank 0 calls what all ranks must; returns what it was told."""
    import time

    import keras

    x, y = models.data("dense", steps=1)
    with tfdist.scope():
        model = models.dense()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tfdist.DistributedOptimizer("sgd"), loss)
    model.fit(tfdist.shard((x, y), batch_size=4), verbose=0, shuffle=False)
    if tfdist.rank() > 0:
        time.sleep(12.0)
        return ""
    try:
        getattr(model, call)(x, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing() -> str:
    """A callback raises on the last rank only; returns what each rank was told."""
    import keras

    x, y = models.data("dense")

    class Failing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and tfdist.rank() == tfdist.size() - 1:
                raise ValueError("a callback failed")

    with tfdist.scope():
        model = models.dense()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tfdist.DistributedOptimizer("sgd"), loss)
    try:
        model.fit(
            tfdist.shard((x, y), batch_size=4), epochs=3, verbose=0, shuffle=False, callbacks=[Failing()]
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _apart(ones: Any, others: Any) -> float:
    """The largest difference between two lists of arrays."""
    pairs = zip(ones, others, strict=True)
    return max(
        float(np.abs(np.asarray(one, "float64") - np.asarray(other, "float64")).max()) for one, other in pairs
    )
