"""`recompute_model`: whole models, cut by number, by memory, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.layers.recomputed import random
from tfdist.keras_compat.functional_graphs import graph_of, nodes_of
from tfdist.layers import recompute_model
from tfdist.layers.kept_bytes import measure_chain

X, TOKENS, Y = random(8, 6), np.array([[1, 2, 0], [3, 1, 1]] * 4), random(8, 1)


def sequential() -> Any:
    keras.utils.set_random_seed(4)
    hidden = [
        layer
        for _ in range(2)
        for layer in (layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.2))
    ]
    hidden[0] = layers.Dense(6, activity_regularizer="l2")
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1)])


def branching() -> Any:
    """Two inputs, a mask that crosses cuts, a residual connection, plain operations, two outputs."""
    keras.utils.set_random_seed(4)
    x, tokens = keras.Input((6,)), keras.Input((3,), dtype="int32")
    hidden = layers.Dropout(0.2)(layers.Dense(6, activation="tanh", activity_regularizer="l2")(x))
    hidden = layers.BatchNormalization()(hidden) + x
    embedded = layers.Embedding(4, 5, mask_zero=True)(tokens)
    pooled = layers.GlobalAveragePooling1D()(layers.Dropout(0.1)(embedded))
    joined = keras.ops.concatenate([hidden, keras.ops.tanh(pooled)], axis=-1)
    shared = layers.Dense(11)
    joined = shared(shared(joined))
    return keras.Model([x, tokens], {"a": layers.Dense(1)(joined), "b": hidden})


def trained(model: Any, **options: Any) -> list[np.ndarray]:
    two = len(graph_of(model).inputs) == 2
    inputs: Any = [X, TOKENS] if two else X
    targets: Any = {"a": Y, "b": X} if two else Y
    model.compile(keras.optimizers.Adam(0.01), {"a": "mse", "b": "mse"} if two else "mse", **options)
    history = model.fit(inputs, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), np.asarray(history.history["loss"])]


def assert_close(actual: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def parts_of(model: Any) -> Any:
    return graph_of(model).__dict__["_run_through_graph"].parts


@pytest.mark.parametrize("make", [sequential, branching])
def test_eager_bit_by_bit(make: Any) -> None:
    wanted = trained(make(), run_eagerly=True)
    for blocks in ("sqrt", 1):
        assert_close(trained(recompute_model(make(), blocks), run_eagerly=True), wanted, 0.0)


@pytest.mark.parametrize("make", [sequential, branching])
def test_graph(make: Any) -> None:
    model = recompute_model(make())
    assert 1 < len(parts_of(model)) < len(nodes_of(graph_of(model)))
    assert_close(trained(model), trained(make()), 1e-5)


def test_names(tmp_path: Path) -> None:
    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(6, activation="tanh", name="first")
            self.last = layers.Dense(1, name="last")

        def call(self, x: Any) -> Any:
            return self.last(self.first(x))

    model = Subclassed()
    model(X)
    assert recompute_model(model, ["first"]) is model
    assert "call" in model.first.__dict__
    assert "call" not in model.last.__dict__
    with pytest.raises(ValueError, match=r"(?s)of which \['second'\] are none.*first, last"):
        recompute_model(model, ["second"])
    with pytest.raises(TypeError, match=r"cuts Functional and built Sequential models; received Subclassed"):
        recompute_model(model)


def test_files_stay(tmp_path: Path) -> None:
    model = recompute_model(branching(), 3)
    wanted = trained(model, run_eagerly=True)
    model.save(tmp_path / "cut.keras")
    model.save_weights(tmp_path / "cut.weights.h5")
    loaded = keras.models.load_model(tmp_path / "cut.keras")
    assert [weight.path for weight in loaded.weights] == [weight.path for weight in model.weights]
    plain = branching()
    plain.load_weights(tmp_path / "cut.weights.h5")
    for each in (loaded, plain):
        assert_close(each.get_weights(), wanted[:-1], 0.0)
        assert "_run_through_graph" not in each.__dict__


def test_predict_and_symbolic_calls_are_plain() -> None:
    model, plain = recompute_model(sequential()), sequential()
    np.testing.assert_array_equal(model.predict(X, verbose=0), plain.predict(X, verbose=0))
    assert model(keras.Input((6,))).shape == (None, 1)


def test_budget() -> None:
    def deep() -> Any:
        hidden = [layers.Dense(64, activation="tanh") for _ in range(20)]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(1)])

    model = deep()
    weights = 4 * sum(int(np.prod(weight.shape)) for weight in model.weights)
    activations = 4096 * 64 * 4  # of one layer
    fixed = 4 * weights  # weights, gradients, two slots
    recompute_model(model, memory=fixed + 22 * activations, batch_size=4096)
    assert not any(part.recomputes for part in parts_of(model))
    recompute_model(model, memory=fixed + 14 * activations, batch_size=4096)
    some = sum(len(part.layers) for part in parts_of(model) if part.recomputes)
    recompute_model(model, memory=fixed + 11 * activations, batch_size=4096)
    more = sum(len(part.layers) for part in parts_of(model) if part.recomputes)
    assert 0 < some < more
    with pytest.raises(ValueError, match=r"(?s)down to [0-9,]+ bytes.*received memory='1MB'"):
        recompute_model(model, memory="1MB", batch_size=4096)


def test_what_is_kept() -> None:
    """A dense layer with tanh keeps its output; an addition, nothing; attention, its scores."""
    x = keras.Input((6, 8))
    hidden = layers.Dense(8, activation="tanh")(x)
    added = hidden + x
    attended = layers.MultiHeadAttention(2, 4)(added, added)
    model = keras.Model(x, attended)
    dense, addition, attention = measure_chain(model, 10).kept
    row = 10 * 6 * 8 * 4
    assert dense == row
    assert addition <= row
    assert attention >= 4 * row + 10 * 2 * 6 * 6 * 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"blocks": 0},
        {"blocks": "half"},
        {"blocks": 2, "memory": "1GB", "batch_size": 2},
        {"memory": "1GB"},
        {"batch_size": 2},
        {"memory": "much", "batch_size": 2},
        {"blocks": []},
    ],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"received"):
        recompute_model(sequential(), **arguments)
    with pytest.raises(TypeError, match=r"takes a keras.Model; received"):
        recompute_model(layers.Dense(1))


def test_second_cut_replaces_the_first() -> None:
    model = recompute_model(recompute_model(sequential(), 2), 5)
    assert len(parts_of(model)) <= 5
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X, training=True) ** 2)
    assert all(gradient is not None for gradient in tape.gradient(loss, model.trainable_variables))
