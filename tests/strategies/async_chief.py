"""What the chief of an `async_parameter_server` world does for `test_async_parameter_server.py`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 1000
BATCH = 32
STEPS = -(-ROWS // BATCH)


def world() -> dict[str, Any]:
    import tfdist

    return {
        "rank": tfdist.rank(),
        "size": tfdist.size(),
        "replicas": tfdist.replicas(),
        "backend": tfdist.backend(),
        "sum": float(tfdist.allreduce(2.0, op=tfdist.Sum)),
    }


def data(rows: int = ROWS) -> tuple[Any, Any]:
    random = np.random.RandomState(0)
    x = random.randn(rows, 8).astype("float32")
    return x, (x[:, :3].sum(1) > 0).astype("int32")


def classifier(*extra: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), *extra, keras.layers.Dense(2)]
    )


def loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(make: Callable[[], Any], optimizer: Any, **options: Any) -> Any:
    """A model on the servers; `optimizer()` makes its optimizer."""
    import tfdist

    with tfdist.scope():
        model = make()
        model.compile(tfdist.DistributedOptimizer(optimizer()), loss(), **options)
    return model


# Equal to one process, where one step runs at a time.

NETWORKS: dict[str, Callable[[], Any]] = {}


def _network(make: Callable[[], Any]) -> Callable[[], Any]:
    NETWORKS[make.__name__] = make
    return make


@_network
def dense() -> Any:
    return classifier()


@_network
def normalized() -> Any:
    import keras

    return classifier(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))


@_network
def regularized() -> Any:
    import keras

    layer = keras.layers.Dense(
        8, kernel_regularizer="l2", activity_regularizer="l2", kernel_constraint="max_norm"
    )
    return classifier(layer)


@_network
def embedding() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x) * 10, "int32")),
            keras.layers.Embedding(50, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def optimizers() -> dict[str, Callable[[], Any]]:
    import keras

    o = keras.optimizers
    schedule = o.schedules.ExponentialDecay(0.05, 5, 0.9)
    return {
        "sgd": lambda: o.SGD(0.1, momentum=0.9),
        "adam": lambda: o.Adam(1e-2),
        "clipped": lambda: o.AdamW(1e-2, weight_decay=0.01, global_clipnorm=0.5, use_ema=True),
        "scheduled": lambda: o.SGD(schedule, clipnorm=0.3),
        "accumulated": lambda: o.SGD(0.1, gradient_accumulation_steps=2),
        "scaled": lambda: o.LossScaleOptimizer(o.Adam(1e-2), initial_scale=2.0**10, dynamic_growth_steps=7),
    }


def difference_from_one_process(network: str, optimizer: str) -> dict[str, float]:
    """Largest differences of weights, optimizer state and logs after two epochs in the same order of batches."""
    import tfdist

    x, y = data(200)
    options: dict[str, Any] = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    make, build = NETWORKS[network], optimizers()[optimizer]
    served = compiled(make, build, metrics=["accuracy"])
    logs = served.fit(x, y, validation_data=(x, y), **options).history
    with tfdist.local():
        alone = make()
        alone.compile(build(), loss(), metrics=["accuracy"])
        expected = alone.fit(x, y, validation_data=(x, y), **options).history
    assert set(logs) == {*expected, "staleness"}, logs
    return {
        "weights": _largest(served.get_weights(), alone.get_weights()),
        "state": _largest(
            [variable.numpy() for variable in served.optimizer.variables],
            [variable.numpy() for variable in alone.optimizer.variables],
        ),
        "logs": max(_largest([logs[name]], [expected[name]]) for name in expected),
        "staleness": max(logs["staleness"]),
    }


def _largest(some: Any, others: Any) -> float:
    pairs = zip(some, others, strict=True)
    return max(float(np.max(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")))) for a, b in pairs)


# Counts, where steps race.


def exact_counts(epochs: int, rows: int = ROWS, folder: str = "") -> dict[str, Any]:
    """What must be exact: iterations, slot updates, samples in metrics, and the bound.

    It makes a file in `folder` once it trains.
    """
    import keras

    class Counting(keras.optimizers.SGD):
        """Also counts its updates in a slot per weight."""

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.counts = [self.add_variable_from_reference(each, "count") for each in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient, variable, learning_rate)
            self.assign_add(self.counts[self._get_variable_index(variable)], keras.ops.ones_like(variable))

    class Samples(keras.metrics.Metric):
        tfdist_state = "sum"

        def __init__(self) -> None:
            super().__init__(name="samples")
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

        def result(self) -> Any:
            return self.total

    import tfdist

    x, y = data(rows)
    batches: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            batches.append(logs["samples"])
            if folder and len(batches) == 20:
                Path(folder, "trains").touch()

    with tfdist.scope():
        model = classifier()
        optimizer = Counting(0.01)
        model.compile(tfdist.DistributedOptimizer(optimizer), loss(), metrics=["accuracy", Samples()])
    history = model.fit(
        tfdist.shard((x, y), batch_size=BATCH), epochs=epochs, verbose=0, callbacks=[Watch()]
    ).history
    steps = -(-rows // BATCH)
    return {
        "iterations": int(model.optimizer.iterations),
        "slot updates": sorted({float(v) for count in optimizer.counts for v in np.ravel(count.numpy())}),
        "samples": history["samples"],
        "batch logs": len(batches),
        "samples grow": batches[:steps] == sorted(set(batches[:steps])),
        "staleness": history["staleness"],
        "loss": history["loss"],
    }


def rows_seen(kind: str) -> list[list[int]]:
    """How often each row was used, in each of two epochs: [times, rows that were used so often]."""
    import keras
    import tensorflow as tf

    import tfdist

    rows = 203
    x = np.arange(rows, dtype="float32")[:, None]
    seen: list[list[int]] = []

    class Seen(keras.metrics.Metric):
        tfdist_state = "sum"

        def __init__(self) -> None:
            super().__init__(name="seen")
            self.counts = self.add_variable((rows,), "zeros", name="counts")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            numbers = keras.ops.cast(keras.ops.reshape(y_true, [-1]), "int32")
            self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(numbers, rows), axis=0))

        def result(self) -> Any:
            return keras.ops.sum(self.counts)

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            counts = Counter(int(n) for n in metric.counts.numpy())
            seen.append(sorted([times, number] for times, number in counts.items())[0])
            assert len(counts) == 1, counts

    with tfdist.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        metric = Seen()
        model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-7)), "mse", metrics=[metric])
    dataset = tf.data.Dataset.from_tensor_slices((x, x))
    options: dict[str, Any] = {}
    if kind == "shard of arrays":
        given: tuple[Any, ...] = (tfdist.shard((x, x), batch_size=10),)
    elif kind == "shard of a dataset":
        given = (tfdist.shard(dataset.batch(10)),)
    elif kind == "arrays":
        given, options = (x, x), {"batch_size": 10}
    elif kind == "repeated dataset":
        given, options = (dataset.batch(10).repeat(),), {"steps_per_epoch": 21}
    else:  # of unknown length
        given = (dataset.filter(lambda *_: True).batch(10),)
    model.fit(*given, epochs=2, verbose=0, callbacks=[Note()], **options)
    return seen


# Callbacks, files and options.


def mixed_precision() -> dict[str, Any]:
    import keras

    import tfdist

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x, y = data()
        model = compiled(classifier, lambda: keras.optimizers.Adam(1e-2), metrics=["accuracy"])
        wrapped = type(model.optimizer).__name__
        history = model.fit(tfdist.shard((x, y), batch_size=BATCH), epochs=3, verbose=0).history
        return {
            "optimizer": wrapped,
            "iterations": int(model.optimizer.iterations),
            "scale": float(model.optimizer.dynamic_scale.numpy()),
            "accuracy": history["accuracy"],
        }
    finally:
        keras.mixed_precision.set_global_policy("float32")


def callbacks() -> dict[str, Any]:
    """Stock callbacks, steps_per_execution, and what they leave behind."""
    import keras

    import tfdist

    x, y = data()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = compiled(
            lambda: classifier(keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)),
            lambda: keras.optimizers.Adam(1e-2),
            metrics=["accuracy"],
            steps_per_execution=4,
        )
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (1 + epoch))
        plateau = keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.5, patience=1, min_delta=10.0
        )
        stop = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=10.0, patience=3)
        history = model.fit(
            tfdist.shard((x, y), batch_size=BATCH),
            validation_data=(x, y),
            epochs=9,
            verbose=0,
            callbacks=[
                *tfdist.callbacks.default(),
                rates,
                plateau,
                stop,
                keras.callbacks.ModelCheckpoint(f"{folder}/best.keras"),
                keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            ],
        ).history
        found["epochs"] = len(history["loss"])
        found["rates"] = [round(float(rate), 5) for rate in history["learning_rate"]]
        found["accuracy"] = history["val_accuracy"][-1]
        found["csv"] = Path(folder, "log.csv").read_text().splitlines()[0].split(",")
        with tfdist.local():
            loaded = keras.models.load_model(f"{folder}/best.keras")
            found["loaded iterations"] = int(loaded.optimizer.iterations)
            found["loaded optimizer"] = type(loaded.optimizer).__name__
            found["loaded weights"] = _largest(model.get_weights(), loaded.get_weights())
            found["loaded slots"] = _largest(
                [v.numpy() for v in model.optimizer.variables],
                [v.numpy() for v in loaded.optimizer.variables],
            )
            found["evaluate"] = abs(loaded.evaluate(x, y, verbose=0)[0] - model.evaluate(x, y, verbose=0)[0])
            found["predict"] = _largest([model.predict(x, verbose=0)], [loaded.predict(x, verbose=0)])
        with tfdist.scope():
            again = tfdist.load_model(f"{folder}/best.keras")
        again.fit(tfdist.shard((x, y), batch_size=BATCH), verbose=0)
        found["trained again"] = int(again.optimizer.iterations)
        found["tfdist.predict"] = _largest(
            [model.predict(x, verbose=0)], [tfdist.predict(model, x, verbose=0)]
        )
    found["iterations"] = int(model.optimizer.iterations)
    return found


def stop_within_an_epoch() -> dict[str, Any]:
    import keras

    import tfdist

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 6:
                self.model.stop_training = True

    x, y = data()
    model = compiled(classifier, keras.optimizers.SGD, metrics=["accuracy"])
    shard = tfdist.shard((x, y), batch_size=BATCH)
    model.fit(shard, epochs=3, verbose=0, callbacks=[Stop()])
    stopped = int(model.optimizer.iterations)
    single = model.train_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    after_one = int(model.optimizer.iterations)
    model.fit(shard, epochs=1, verbose=0)
    return {
        "stopped": stopped, "single": after_one, "fit again": int(model.optimizer.iterations), "logs":
        sorted(single)
    }  # fmt: skip


def resume(folder: str, fail_in: int | None) -> dict[str, Any]:
    """Trains with a backup of each epoch; in one epoch a callback fails."""
    import keras

    import tfdist

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == fail_in:
                raise RuntimeError("on purpose")

    x, y = data()
    model = compiled(classifier, keras.optimizers.Adam)
    backup = keras.callbacks.BackupAndRestore(folder)
    epochs = []
    with contextlib.suppress(RuntimeError):
        epochs = model.fit(
            tfdist.shard((x, y), batch_size=BATCH), epochs=4, verbose=0, callbacks=[backup, Fail()]
        ).epoch
    return {
        "epochs": list(epochs),
        "iterations": int(model.optimizer.iterations),
        "files": os.path.exists(folder),
    }


def sparse_rows() -> dict[str, Any]:
    """A large table: what travels is rows, on whichever server it is."""
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.asynchronous import worker_step

    sparse: list[bool] = []
    leave = worker_step.WorkerStep._leave_on_servers

    def spy(self: Any, result: Any) -> Any:
        sparse.extend(
            isinstance(each, tf.IndexedSlices) for _, gradients, _ in result.gradients for each in gradients
        )
        return leave(self, result)

    worker_step.WorkerStep._leave_on_servers = spy  # type: ignore[method-assign]
    try:
        with tfdist.scope():
            keras.utils.set_random_seed(1)
            table = keras.layers.Embedding(100_000, 4)
            model = keras.Sequential(
                [keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(2)]
            )
            model.compile(tfdist.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), loss())
        before = table.embeddings.numpy()
        ids = np.random.RandomState(0).randint(0, 50, (200, 3)) * 7
        model.fit(ids, ids[:, 0] % 2, batch_size=10, verbose=0, epochs=2)
    finally:
        worker_step.WorkerStep._leave_on_servers = leave  # type: ignore[method-assign]
    changed = np.flatnonzero(np.abs(table.embeddings.numpy() - before).max(1))
    return {
        "sparse": sparse,
        "only used rows": set(changed) <= set(ids.ravel()),
        "all used rows": len(changed) == len(set(ids.ravel())),
        "iterations": int(model.optimizer.iterations),
    }


def own_train_step() -> dict[str, Any]:
    """A train step of the user's, with a log of its own and a variable that it counts in."""
    import keras
    import tensorflow as tf

    import tfdist

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()
            self.steps = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps"
            )

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                value = self.compute_loss(y=y, y_pred=self(x, training=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(value, self.trainable_variables), self.trainable_variables, strict=True)
            )
            self.steps.assign_add(1)
            return {"own": value}

    x, y = data()
    model = compiled(Own, keras.optimizers.Adam)
    history = model.fit(tfdist.shard((x, y), batch_size=BATCH), epochs=2, verbose=0).history
    return {
        "logs": sorted(history),
        "steps": int(model.steps.numpy()),
        "iterations": int(model.optimizer.iterations),
        "own": history["own"],
    }


def refusals() -> dict[str, str]:
    """What is wrong use, and the errors."""
    import keras

    import tfdist

    said: dict[str, str] = {}
    x, y = data(64)

    @contextlib.contextmanager
    def noting(name: str) -> Iterator[None]:
        try:
            yield
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    sgd = keras.optimizers.SGD
    with noting("optimizer outside"):
        tfdist.DistributedOptimizer(sgd())
    outside = classifier()
    with noting("model outside"):
        with tfdist.scope():
            optimizer = tfdist.DistributedOptimizer(sgd())
        outside.compile(optimizer, loss())
    with tfdist.scope():
        for name, options in {
            "passes": {"backward_passes_per_step": 2},
            "compression": {"compression": tfdist.Compression.fp16},
            "sum": {"op": tfdist.Sum},
            "predivide": {"gradient_predivide_factor": 2.0},
            "process set": {"process_set": tfdist.global_process_set},
        }.items():
            with noting(name):
                tfdist.DistributedOptimizer(sgd(), **options)
    with noting("plain optimizer"):
        with tfdist.scope():
            model = classifier()
            model.compile(sgd(), loss())
        model.fit(x, y, verbose=0)
    with noting("fit inside"), tfdist.scope():
        model.fit(x, y, verbose=0)
    with noting("eager"):
        compiled(classifier, sgd, run_eagerly=True).fit(x, y, verbose=0)

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.value

    with noting("metric"):
        with tfdist.scope():
            model = classifier()
            model.compile(tfdist.DistributedOptimizer(sgd()), loss(), metrics=[Largest()])
        model.fit(x, y, verbose=0)
    with noting("error in the step"):
        compiled(classifier, sgd).fit(x, y + 5, verbose=0)
    with noting("trains afterwards"):
        compiled(classifier, sgd).fit(x, y, verbose=0)
    return said


def addresses() -> dict[str, bool]:
    """Whether the servers of this world accept connections, by the kind of address."""
    import socket

    import tfdist
    from tfdist.strategies import placed

    del tfdist
    spec = placed.distribution()._cluster_resolver.cluster_spec().as_dict()
    ports = [int(place.rpartition(":")[2]) for places in spec.values() for place in places]

    def connects(host: str, port: int) -> bool:
        with socket.socket() as probe:
            probe.settimeout(2.0)
            return probe.connect_ex((host, port)) == 0

    own = next((host for host in _own_addresses() if not host.startswith("127.")), None)
    return {
        "loopback": all(connects("127.0.0.1", port) for port in ports),
        "others": own is not None and any(connects(own, port) for port in ports),
    }


def _own_addresses() -> list[str]:
    import psutil

    return [
        address.address
        for each in psutil.net_if_addrs().values()
        for address in each
        if address.family.name == "AF_INET"
    ]


# Losses.


def wait_at_a_batch(folder: str) -> dict[str, Any]:
    """Trains for ever; says so in a file after the first steps."""
    import keras

    import tfdist

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            Path(folder, "trains").touch()

    x, y = data()
    model = compiled(classifier, keras.optimizers.Adam)
    model.fit(tfdist.shard((x, y), batch_size=BATCH), epochs=1_000_000, verbose=0, callbacks=[Tell()])
    return {}
