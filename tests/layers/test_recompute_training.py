"""`recompute` in `fit()`, loops, strategies and files: as the undecorated twin."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.layers import recomputed
from tests.layers.recomputed import plain
from tests.source_tree import search_path
from tests.worlds import World, in_one_process, on
from tfdist.layers import accumulate_gradients, recompute

FIT_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"run_eagerly": True},
    "no XLA, several steps": {"jit_compile": False, "steps_per_execution": 2},
    "XLA": {"jit_compile": True},
}


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    """Dropout, moving statistics and weights of its own."""

    def __init__(self, units: int = 6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units, activation="tanh")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.2)

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(), initializer="ones", name="gain")
        self.dense.build(shape)
        self.norm.build((*shape[:-1], self.units))

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.gain * self.drop(self.norm(self.dense(x), training=training), training=training)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def model_of(form: Callable[[Any], Any], seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    blocks = [form(Block(name=f"block_{i}")) for i in range(2)]
    return keras.Sequential([keras.Input((6,)), *blocks, layers.Dense(1)])


def data(rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    return recomputed.random(rows, 6), recomputed.random(rows, 1)


@functools.cache
def fitted(form: Callable[[Any], Any], mode: str) -> list[np.ndarray]:
    model = model_of(form)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **FIT_MODES[mode])
    history = model.fit(*data(), batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *(np.asarray(values) for values in history.history.values())]


def assert_close(actual: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-5) -> None:
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", FIT_MODES)
def test_fit(mode: str) -> None:
    actual, wanted = fitted(recompute, mode), fitted(plain, mode)
    if mode == "eager":
        assert_close(actual, wanted, 0.0)
    else:
        assert_close(actual, wanted)


@hypothesis.given(
    st.lists(st.sampled_from(["dense", "norm", "drop", "noise", "block", "inner"]), min_size=1, max_size=5)
)
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
def test_stacks_of_layers(kinds: list[str]) -> None:
    """In one block, and some of them blocks of their own inside it."""

    def stack() -> Any:
        keras.utils.set_random_seed(5)
        make = {
            "dense": lambda: layers.Dense(6, activation="gelu"),
            "norm": layers.BatchNormalization,
            "drop": lambda: layers.Dropout(0.3),
            "noise": lambda: layers.GaussianNoise(0.1),
            "block": Block,
            "inner": lambda: recompute(keras.Sequential([Block(), layers.Dropout(0.1)])),
        }
        result = keras.Sequential([make[kind]() for kind in kinds])
        result.build((None, 6))
        return result

    def gradients(layer: Any) -> list[np.ndarray]:
        x = tf.constant(data()[0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        found = tape.gradient(loss, [x, *layer.trainable_variables])
        return [np.asarray(each) for each in (loss, *found, *layer.non_trainable_variables)]

    assert_close(gradients(recompute(stack())), gradients(stack()), 0.0)


def test_race_of_two_thousand_steps() -> None:
    """A weight that the backward pass read after its update would part the twins within a few steps."""

    def train(form: Callable[[Any], Any]) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        stack = [
            form(keras.Sequential([layers.Dense(8, activation="tanh") for _ in range(2)])) for _ in range(3)
        ]
        model = keras.Sequential([keras.Input((8,)), *stack, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02), "mse", steps_per_execution=100)
        x = recomputed.random(8, 8)
        batch = tf.data.Dataset.from_tensors((x, x[:, :1] ** 2)).cache().repeat(2000)
        model.fit(batch, verbose=0)
        return [np.asarray(each) for each in model.get_weights()]

    assert_close(train(recompute), train(plain), 1e-4)


def loops() -> dict[str, Callable[[Any, Any], list[Any]]]:
    def custom(model: Any, x: Any) -> list[Any]:
        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        return list(step(x))

    def inside_a_loop(model: Any, x: Any) -> list[Any]:
        """Without state that is assigned, which TensorFlow's loops can't carry."""

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                _, y = tf.while_loop(
                    lambda i, _: i < 3, lambda i, y: (i + 1, model(y) * 0.5 + y), [0, x], maximum_iterations=3
                )
                loss = tf.reduce_sum(y**2)
            return tape.gradient(loss, [x, *model.trainable_variables])

        return list(step(x))

    def second_order(model: Any, x: Any) -> list[Any]:
        """The penalty on the norm of gradients, as of WGAN-GP."""

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(model(x, training=True) ** 2)
                penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
            return outer.gradient(penalty, model.trainable_variables[:-1])

        return list(step(x))

    return {"custom": custom, "inside a loop": inside_a_loop, "second order": second_order}


@pytest.mark.parametrize("name", loops())
def test_loops(name: str) -> None:
    found = []
    for form in (recompute, plain):
        if name == "inside a loop":
            keras.utils.set_random_seed(3)
            model = keras.Sequential(
                [keras.Input((6,)), form(keras.Sequential([layers.Dense(6, "tanh")] * 1))]
            )
        else:
            model = model_of(form)
        found.append(loops()[name](model, tf.constant(data(4)[0])))
        model(data(4)[0])
    assert_close(*[[np.asarray(tf.convert_to_tensor(each)) for each in side] for side in found])


def test_gradients_of_inference() -> None:
    """`training=False` under a tape, as for a saliency map."""
    x = tf.constant(data()[0])
    found = []
    for form in (recompute, plain):
        model = model_of(form)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x, training=False) ** 2)
        found.append([tape.gradient(loss, x).numpy()])
    assert_close(*found, 0.0)


def test_embeddings_keep_sparse_gradients() -> None:
    tokens = tf.constant([[1, 2, 1]])
    found = []
    for form in (recompute, plain):
        keras.utils.set_random_seed(0)
        layer = form(layers.Embedding(50, 3))
        layer.build((None, 3))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tokens) ** 2)
        found.append(tape.gradient(loss, layer.trainable_variables)[0])
    assert isinstance(found[0], tf.IndexedSlices)
    np.testing.assert_array_equal(found[0].values, found[1].values)


@pytest.mark.parametrize("form", ["class", "instance"])
def test_files_go_both_ways(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()

    def made(seed: int) -> Any:
        """A decorated model."""
        if form == "instance":
            return model_of(recompute, seed)
        decorate_class()
        return model_of(plain, seed)

    def decorate_class() -> None:
        monkeypatch.setattr(Block, "call", Block.call)
        monkeypatch.setattr(Block, "__call__", Block.__call__)
        recompute(Block)

    def predicted(model: Any) -> np.ndarray:
        return np.asarray(model(x))

    model = made(3)
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(x, y, verbose=0)
    wanted = predicted(model)
    model.save(tmp_path / "decorated.keras")
    model.save_weights(tmp_path / "decorated.weights.h5")

    monkeypatch.undo()
    loaded = keras.models.load_model(tmp_path / "decorated.keras")
    assert type(loaded.layers[0]) is Block
    np.testing.assert_array_equal(predicted(loaded), wanted)
    assert int(loaded.optimizer.iterations) == 1
    bare = model_of(plain, seed=9)
    bare.load_weights(tmp_path / "decorated.weights.h5")
    np.testing.assert_array_equal(predicted(bare), wanted)
    bare.save_weights(tmp_path / "plain.weights.h5")
    bare.save(tmp_path / "plain.keras")

    again = made(8)
    again.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_array_equal(predicted(again), wanted)
    np.testing.assert_array_equal(predicted(keras.models.load_model(tmp_path / "plain.keras")), wanted)


def test_export(tmp_path: Path) -> None:
    model = model_of(recompute)
    model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(served.serve(x), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@functools.cache
def two_replicas() -> Any:
    """One for all models: TensorFlow numbers collectives by strategy, and those of two would meet."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def mirrored_step(form: Callable[[Any], Any]) -> list[np.ndarray]:
    with two_replicas().scope():
        model = model_of(form)
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0)
    return [np.asarray(each) for each in model.get_weights()]


def mirrored_slices(sliced: bool) -> list[np.ndarray]:
    """Without normalization over the batch, which slices see a part of."""
    keras.utils.set_random_seed(3)
    with two_replicas().scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    if sliced:
        accumulate_gradients(model, steps=2)
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0)
    return [np.asarray(each) for each in model.get_weights()]


def test_mirrored_strategy() -> None:
    """In a process of its own, since devices must be split before TensorFlow starts."""
    code = (
        "import tensorflow as tf\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "from tests.layers import test_recompute_training as tests\n"
        "plain = tests.mirrored_step(tests.plain)\n"
        "tests.assert_close(tests.mirrored_step(tests.recompute), plain)\n"
        "sliced = tests.mirrored_slices(True)\n"
        "tests.assert_close(sliced, tests.mirrored_slices(False))\n"
        "print('equal')\n"
    )
    environment = {**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": "-1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment
    )
    assert "equal" in result.stdout, result.stderr[-3000:]


def fit_on_ranks(recomputes: bool) -> dict[str, Any]:
    """A few steps on this rank's share, with batch normalization over all ranks."""
    import tfdist

    model = model_of(plain)
    if tfdist.size() > 1:
        tfdist.layers.sync_batch_norm(model)
    for layer in model.layers[:2]:
        layer.drop.rate = 0.0  # masks differ between ranks
        if recomputes:
            recompute(layer)
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    batches = tfdist.shard(data(), batch_size=8 // tfdist.size())
    model.fit(batches, epochs=2, shuffle=False, verbose=0, callbacks=tfdist.callbacks.default())
    return {"weights": model.get_weights(), "digest": tfdist.check_in_sync(model)}


@on(("tf", 2))
def test_ranks_with_synchronized_batch_normalization(world: World) -> None:
    """The second run asks no rank, and N ranks end where one undecorated process does."""
    expected = in_one_process(fit_on_ranks, False)
    results = world.call(fit_on_ranks, True)
    assert results[0]["digest"] == results[1]["digest"]
    assert_close(results[0]["weights"], expected["weights"])
