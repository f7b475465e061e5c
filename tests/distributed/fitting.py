"""What each rank runs in `test_fit_session.py`: `fit()` with unequal data, early ends and failures."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.distributed import bodies

_RANDOM = np.random.default_rng(5)
X = _RANDOM.standard_normal((160, 6)).astype("float32")
Y = _RANDOM.integers(0, 3, 160)
VALIDATION = slice(130, 160)

# Rows of each batch, by rank. A world of more ranks than listed has ranks without data.
PLANS: dict[str, list[list[range]]] = {
    "fewer batches": [
        [range(8 * i, 8 * i + 8) for i in range(5)],
        [range(64 + 8 * i, 72 + 8 * i) for i in range(3)],
    ],
    "smaller batches": [
        [range(10 * i, 10 * i + 10) for i in range(3)],
        [range(40 + 4 * i, 44 + 4 * i) for i in range(3)],
    ],
    "no data": [[range(8 * i, 8 * i + 8) for i in range(4)], []],
    "ragged": [
        [range(8), range(8, 16), range(16, 19)],
        [range(20, 28), range(30, 38), range(50, 51), range(60, 67)],
        [range(70, 78)],
        [range(80, 88), range(88, 90), range(90, 98), range(98, 106), range(110, 115)],
    ],
    "equal": [
        [range(8 * i, 8 * i + 8) for i in range(5)],
        [range(64 + 8 * i, 72 + 8 * i) for i in range(5)],
    ],
}


def model(**options: Any) -> Any:
    """An untrained model. It is compiled once in a process, since most of a run would go into tracing it."""
    made, start = _compiled(json.dumps(options))
    for variable, value in zip([*made.variables, *made.optimizer.variables], start, strict=True):
        variable.assign(value)
    return made


@functools.cache
def _compiled(options: str) -> tuple[Any, list[np.ndarray]]:
    made = new_model(**json.loads(options))
    made.optimizer.build(made.trainable_variables)
    return made, [variable.numpy() for variable in [*made.variables, *made.optimizer.variables]]


def new_model(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(7)
    made = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    made.compile(
        bodies.wrap(keras.optimizers.Adam(0.02)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return made


def batches(plan: str, ranks: int) -> list[list[int]]:
    """Rows of this rank's batches; in one process the union of `ranks` ranks' batches, step by step."""
    import tfdist

    lists = [*PLANS[plan], *[[]] * ranks][:ranks]
    if tfdist.size() > 1:
        return [list(rows) for rows in lists[tfdist.rank()]]
    steps = max(len(each) for each in lists)
    return [[row for each in lists if step < len(each) for row in each[step]] for step in range(steps)]


def dataset(rows: Sequence[Sequence[int]], *, length: bool, fails_at: int = -1) -> Any:
    import tensorflow as tf

    def generate() -> Any:
        for number, each in enumerate(rows):
            if number == fails_at:
                raise ValueError("unreadable sample")
            yield X[list(each)], Y[list(each)]

    data = tf.data.Dataset.from_generator(
        generate, output_signature=(tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int64))
    )
    return data.apply(tf.data.experimental.assert_cardinality(len(rows))) if length else data


def validation(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """A part of the rows, larger on later ranks; in one process all of them."""
    import tfdist

    x, y = X[VALIDATION], Y[VALIDATION]
    if tfdist.size() == 1:
        return x, y
    edges = [len(x) * (k * (k + 1)) // (ranks * (ranks + 1)) for k in range(ranks + 1)]
    part = slice(edges[tfdist.rank()], edges[tfdist.rank() + 1])
    return x[part], y[part]


def uneven(plan: str, ranks: int, length: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains on batches of unequal number and size; in one process always of known length.

    (At the end of data of unknown length, Keras counts a step of the optimizer too much.)
    """
    import tfdist

    options = dict(options)
    steps = options.pop("steps_per_epoch", None)
    trained = model(**options)
    before = bodies.weights_of(trained)
    data = dataset(batches(plan, ranks), length=length or tfdist.size() == 1)
    history = trained.fit(
        data, epochs=3, steps_per_epoch=steps, validation_data=validation(ranks), verbose=0
    ).history
    return bodies.outcome(trained, before) | {"history": history}


def stopping(when: str, options: dict[str, Any]) -> dict[str, Any]:
    """A callback of the last rank stops training; all ranks must stop with it."""
    import keras

    import tfdist

    class Stop(keras.callbacks.Callback):
        epoch = 0
        batches = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            if when == "batch" and self.epoch == 1 and batch >= 1 and self.mine():
                self.model.stop_training = True
            if when == "last batch" and self.epoch == 1 and batch == 4 and self.mine():
                self.model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if when == "epoch" and epoch == 1 and self.mine():
                self.model.stop_training = True

        def mine(self) -> bool:
            return tfdist.rank() == tfdist.size() - 1

    trained = model(**options)
    before = bodies.weights_of(trained)
    stop = Stop()
    data = dataset(batches("equal", 2), length=True)
    history = trained.fit(data, epochs=4, verbose=0, callbacks=[stop]).history
    return bodies.outcome(trained, before) | {
        "epochs": len(history["loss"]),
        "stopped": trained.stop_training,
    }


FAILURES = (
    "on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "last on_train_batch_end",
    "on_test_batch_end", "on_epoch_end", "on_train_end", "data",
)  # fmt: skip


def failing(options: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The last rank fails in every place in turn; then all train again, equally."""
    import keras

    import tfdist

    mine = tfdist.rank() == tfdist.size() - 1
    said = {}
    trained = model(**options)
    rows = batches("equal", tfdist.size())
    for place in FAILURES:

        class Failing(keras.callbacks.Callback):
            at = place
            epoch = 0

            def _fail(self, name: str, number: int = 2) -> None:
                last = self.at.startswith("last ")
                if mine and name == self.at.removeprefix("last ") and number == (4 if last else 2):
                    raise ValueError(f"raised in {self.at}")

            def on_train_begin(self, logs: Any = None) -> None:
                self._fail("on_train_begin")

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self._fail("on_epoch_begin", 2 if epoch == 1 else 0)

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                self._fail("on_train_batch_begin", batch)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self._fail("on_train_batch_end", batch)

            def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
                self._fail("on_test_batch_end")

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self._fail("on_epoch_end", 2 if epoch == 1 else 0)

            def on_train_end(self, logs: Any = None) -> None:
                self._fail("on_train_end")

        data = dataset(rows, length=True, fails_at=2 if mine and place == "data" else -1)
        try:
            trained.fit(
                data, epochs=2, validation_data=validation(tfdist.size()), verbose=0, callbacks=[Failing()]
            )
            said[place] = ("nothing", "")
        except Exception as error:
            said[place] = (type(error).__name__, str(error))
        tfdist.check_in_sync(trained)
        trained.fit(dataset(rows, length=True), verbose=0)
        said[f"{place}, then"] = (tfdist.check_in_sync(trained), "")
    return said


def failing_midway() -> tuple[str, str, float]:
    """The last rank fails in its third step, when it has sent the last layer's gradient but not the first's."""
    import keras
    import tensorflow as tf

    import tfdist

    steps = tf.Variable(0, trainable=False)

    def check(step: Any) -> Any:
        if step == 3 and tfdist.rank() == tfdist.size() - 1:
            time.sleep(2.0)  # the last layer's gradient goes out
            raise ValueError("out of memory")
        return np.float32(1.0)

    @tf.custom_gradient
    def failing(inputs: Any) -> Any:
        return tf.identity(
            inputs
        ), lambda back: back * tf.numpy_function(check, [steps.read_value()], tf.float32)

    class Failing(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            steps.assign_add(1)
            return failing(inputs)

    keras.utils.set_random_seed(7)
    layers = [keras.Input((6,)), keras.layers.Dense(8), Failing(), keras.layers.Dense(3)]
    made = keras.Sequential(layers)
    made.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), bucket_bytes=1), "mse")
    start = time.monotonic()
    try:
        made.fit(X[:64], X[:64, :3], batch_size=8, verbose=0)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


def frozen_on_one_rank() -> str:
    """The last rank leaves out a layer."""
    import tfdist

    trained = new_model()
    trained.layers[0].trainable = tfdist.rank() < tfdist.size() - 1
    try:
        trained.fit(dataset(batches("equal", 2), length=True), verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def disagreeing() -> str:
    """Ranks ask for different numbers of epochs."""
    import tfdist

    try:
        model().fit(dataset(batches("equal", 2), length=True), epochs=1 + tfdist.rank(), verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def deciding(kind: str) -> dict[str, Any]:
    """Stock callbacks that decide by the logs."""
    import keras

    import tfdist

    decide = {
        "EarlyStopping": lambda: keras.callbacks.EarlyStopping(
            "val_loss", patience=1, restore_best_weights=True, min_delta=0.01
        ),
        "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(
            "val_accuracy", factor=0.5, patience=1, min_lr=1e-4
        ),
        "TerminateOnNaN": keras.callbacks.TerminateOnNaN,
    }[kind]()
    trained = model()
    before = bodies.weights_of(trained)
    rows = batches("equal", 2)
    x = X.copy()
    if kind == "TerminateOnNaN":
        x[rows[2][-1]] = np.nan if tfdist.rank() == tfdist.size() - 1 else x[rows[2][-1]]
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(
        lambda: ((x[each], Y[each]) for each in rows),
        output_signature=(tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int64)),
    ).apply(tf.data.experimental.assert_cardinality(len(rows)))
    history = trained.fit(
        data, epochs=8, validation_data=validation(2), verbose=0, callbacks=[decide]
    ).history
    return bodies.outcome(trained, before) | {"history": history}


def unequal_start(kind: str) -> str:
    """Wrapped, but each rank starts from weights, or a rate, of its own."""
    import keras

    import tfdist

    keras.utils.set_random_seed(7 + (tfdist.rank() if kind == "weights" else 0))
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    rate = 0.1 if kind == "weights" else 0.1 * (1 + tfdist.rank())
    made.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(rate)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = bodies.weights_of(made)
    try:
        made.fit(X[:32], Y[:32], batch_size=8, verbose=0)
    except tfdist.OutOfSyncError as error:
        assert all((a == b).all() for a, b in zip(before, bodies.weights_of(made), strict=True)), (
            "a step was made"
        )
        message = str(error)
    else:
        return "trained"
    made.fit(
        X[:32], Y[:32], batch_size=8, verbose=0,
        callbacks=[tfdist.callbacks.BroadcastGlobalVariablesCallback(0)],
    )  # fmt: skip
    tfdist.check_in_sync(made)
    return message
