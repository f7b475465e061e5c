"""What the tests of the engine run in a process with three logical CPU devices."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.layers.recomputed import random
from tfdist.keras_compat.functional_graphs import graph_of

X, TOKENS, Y = random(22, 6), np.array([[1, 2, 0], [3, 1, 1]] * 11), random(22, 1)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
}


def divide_cpu() -> int:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    return len(tf.config.list_logical_devices("CPU"))


def regular() -> Any:
    """A skip connection across cuts, a shared layer, regularizers, two outputs."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,), name="x")
    hidden = layers.Dense(8, "tanh", activity_regularizer="l2", kernel_regularizer="l2")(inputs)
    hidden = layers.Dense(6)(hidden) + inputs
    shared = layers.Dense(6, "relu")
    hidden = shared(shared(hidden))
    return keras.Model(inputs, {"a": layers.Dense(1)(hidden), "b": layers.Dense(6)(hidden)})


def embedded() -> Any:
    """Whole numbers, and a mask that crosses a cut."""
    keras.utils.set_random_seed(3)
    tokens = keras.Input((3,), dtype="int32")
    hidden = layers.Embedding(4, 5, mask_zero=True)(tokens)
    hidden = layers.LSTM(4)(layers.Dense(5, "tanh")(hidden))
    return keras.Model(tokens, layers.Dense(1)(hidden))


def chain() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(8, "gelu"), layers.Dense(1)]
    )


def _data(model: Any) -> tuple[Any, Any]:
    dictionary = isinstance(graph_of(model)._outputs_struct, dict)
    return (TOKENS if model.inputs[0].dtype == "int32" else X), ({"a": Y, "b": X} if dictionary else Y)


def train(
    model: Any, trained: Any, optimizer: str = "adam", *, weighted: bool = False, **options: Any
) -> Any:
    """Weights, losses, what evaluate and predict give, slots; 22 rows in batches of 8, the last of 6."""
    x, y = _data(model)
    losses = {"a": "mse", "b": "mae"} if isinstance(y, dict) else "mse"
    metrics = {"a": ["mae"], "b": ["mse"]} if isinstance(y, dict) else ["mae"]
    trained.compile(OPTIMIZERS[optimizer](), losses, metrics=metrics, **options)
    weights = {"sample_weight": np.linspace(0.1, 2.0, len(X))} if weighted else {}
    if weighted and isinstance(y, dict):
        weights["sample_weight"] = {"a": weights["sample_weight"], "b": weights["sample_weight"][::-1]}
    history = trained.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **weights)
    outputs = keras.tree.flatten(trained.predict(x, batch_size=8, verbose=0))
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "evaluate": trained.evaluate(x, y, batch_size=8, verbose=0, return_dict=True),
        "predict": outputs,
        "slots": [each.numpy() for each in trained.optimizer.variables],
    }


def compare(make: Any, options: dict[str, Any], micro_batches: int = 4, schedule: str = "gpipe") -> Any:
    """The same training without a pipeline and with one, and the weights before."""
    before = make().get_weights()
    plain = make()
    wanted = train(plain, plain, **options)
    model = make()
    pipe = tfdist.pipeline.Pipeline(
        model, stages=3, micro_batches=micro_batches, schedule=schedule, balance="parameters"
    )
    return before, wanted, train(model, pipe, **options)


def compare_mixed_precision() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return compare(chain, {})
    finally:
        keras.config.set_dtype_policy("float32")


def placement() -> dict[str, Any]:
    """Devices of variables, of slots, and of every matrix product of a training step."""
    model = chain()
    pipe = tfdist.pipeline.Pipeline(
        model, stages=3, micro_batches=2, balance=[each.name for each in model.layers[1:]]
    )
    pipe.compile(keras.optimizers.Adam(0.01), "mse")
    pipe.train_on_batch(X, Y)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((pipe(x, training=True) - y) ** 2)
        return tape.gradient(loss, [each.value for each in pipe.trainable_variables])

    graph = step.get_concrete_function(tf.constant(X), tf.constant(Y)).graph
    products = [each.device[-5:] for each in graph.get_operations() if each.type == "MatMul"]
    slots = pipe.optimizer.variables[2:]
    return {
        "variables": [each._value.device[-5:] for each in pipe.variables],
        "slots": [each._value.device[-5:] for each in slots],
        "products": {name: products.count(name) for name in set(products)},
    }


def random_layers() -> tuple[list[Any], list[Any]]:
    """Dropout and batch normalization against a loop over micro-batches, written out."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        hidden = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.4, seed=1), layers.Dense(8)]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dropout(0.3, seed=2), layers.Dense(1)])

    twin, optimizer = make(), keras.optimizers.SGD(0.1)
    for x, y in ((X[:8], Y[:8]), (X[8:16], Y[8:16])):
        with tf.GradientTape() as tape:
            outputs = tf.concat([twin(x[start : start + 2], training=True) for start in range(0, 8, 2)], 0)
            loss = tf.reduce_mean((outputs - y) ** 2)
        optimizer.apply(
            tape.gradient(loss, [v.value for v in twin.trainable_variables]), twin.trainable_variables
        )
    model = make()
    pipe = tfdist.pipeline.Pipeline(model, stages=3, micro_batches=4, balance="time")
    pipe.compile(keras.optimizers.SGD(0.1), "mse")
    pipe.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    return twin.get_weights(), model.get_weights()


def fewer_rows_than_micro_batches() -> Any:
    results = []
    for pipelined in (False, True):
        model = regular()
        trained = (
            tfdist.pipeline.Pipeline(model, stages=2, micro_batches=8, balance="memory")
            if pipelined
            else model
        )
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        trained.fit(X[:11], {"a": Y[:11], "b": X[:11]}, batch_size=8, shuffle=False, verbose=0)
        results.append(model.get_weights())
    return results


def saved_and_loaded() -> dict[str, Any]:
    """Trains with a pipeline, saves; goes on in plain Keras, and on another number of stages."""
    folder = Path(tempfile.mkdtemp())
    data = {"x": X, "y": {"a": Y, "b": X}, "batch_size": 8, "shuffle": False, "verbose": 0}
    model = regular()
    pipe = tfdist.pipeline.Pipeline(model, stages=3, micro_batches=4, balance="parameters")
    pipe.compile(keras.optimizers.Adam(0.01), {"a": "mse", "b": "mse"})
    pipe.fit(**data, callbacks=[keras.callbacks.ModelCheckpoint(folder / "checkpoint.keras")])
    pipe.save(folder / "model.keras")
    pipe.save_weights(folder / "model.weights.h5")
    plain = regular()
    plain.load_weights(folder / "model.weights.h5")
    loaded = keras.models.load_model(folder / "model.keras")
    again = tfdist.pipeline.Pipeline(
        keras.models.load_model(folder / "checkpoint.keras"), stages=2, micro_batches=2, balance="memory"
    )
    again.compile(again.model.optimizer, {"a": "mse", "b": "mse"})
    result = {
        "class": type(loaded).__name__,
        "names": [each.name for each in loaded.layers] == [each.name for each in model.layers],
        "saved": [model.get_weights(), loaded.get_weights(), plain.get_weights(), again.model.get_weights()],
    }
    for each in (pipe, loaded, again):
        each.fit(**data)
    result["after"] = [each.get_weights() for each in (model, loaded, again.model)]
    result["iterations"] = [int(each.optimizer.iterations) for each in (pipe, loaded, again)]
    return result


def refusals() -> list[str]:
    """Messages of what is refused."""

    class Subclassed(keras.Model):
        pass

    pipeline = tfdist.pipeline.Pipeline
    options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "balance": "parameters"}
    attempts = [
        lambda: pipeline(chain(), **(options | {"schedule": "1f1b"})),
        lambda: pipeline(chain(), **(options | {"schedule": "naive"})),
        lambda: pipeline(chain(), **(options | {"stages": 9})),
        lambda: pipeline(chain(), **(options | {"devices": ["CPU:0", "CPU:7"]})),
        lambda: pipeline(Subclassed(), **options),
        lambda: pipeline(keras.Sequential([layers.Dense(1), layers.Dense(1)]), **options),
        lambda: pipeline(3, **options),
        lambda: pipeline(chain(), **options).compile("sgd", "mse", jit_compile=True),
        lambda: pipeline(chain(), **(options | {"stages": 0})),
        lambda: pipeline(chain(), **(options | {"micro_batches": 0})),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("nothing raised")
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def order_of_replays() -> dict[str, list[bool]]:
    """For each stage: whether each run of its activation in the backward pass waits for one of another."""
    keras.utils.set_random_seed(3)
    hidden = [layers.Dense(5, "tanh"), layers.Dense(5, "tanh"), layers.Dense(5, "tanh")]
    pipe = tfdist.pipeline.Pipeline(
        keras.Sequential([keras.Input((6,)), *hidden]), stages=3, micro_batches=4, balance="parameters"
    )

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(pipe(x, training=True) ** 2)
        return tape.gradient(loss, [each.value for each in pipe.trainable_variables])

    operations = step.get_concrete_function(tf.constant(X)).graph.get_operations()
    before: dict[Any, set[Any]] = {}
    for each in operations:
        inputs = [tensor.op for tensor in each.inputs] + [
            other for other in each.control_inputs if other in before
        ]
        before[each] = set(inputs).union(*(before[other] for other in inputs))
    result = {}
    for device in ("CPU:0", "CPU:1", "CPU:2"):
        runs = [each for each in operations if each.type == "Tanh" and each.device.endswith(device)]
        again = runs[4:]
        assert len(runs) == 8, runs
        result[device] = [former in before[latter] for former, latter in itertools.pairwise(again)]
    return result
