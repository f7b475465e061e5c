"""`accumulate_gradients`: in slices as with the whole batch, for every loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.layers.recomputed import random
from tests.worlds import World, in_one_process, on
from tfdist.layers import accumulate_gradients, accumulating, recompute, recompute_model

ROWS = 13  # no multiple of anything
L2 = keras.regularizers.L2(0.01)


def stack(seed: int = 3) -> Any:
    """No layer that looks at the whole batch, and a loss of its own."""
    keras.utils.set_random_seed(seed)
    hidden = [
        layers.Dense(8, activation="gelu", activity_regularizer=keras.regularizers.L2(0.1)),
        layers.LayerNormalization(),
        layers.Dense(5, kernel_regularizer="l2"),
    ]
    return keras.Sequential([keras.Input((4,)), *hidden])


def gradients(layer: Any, rows: int, *, jit: bool | None = None, dynamic: bool = False) -> list[np.ndarray]:
    """Of a loss that couples the rows of a batch."""

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.nn.softmax(y @ tf.transpose(y)) ** 2) + tf.add_n(layer.losses)
        return [loss, *tape.gradient(loss, [x, *layer.trainable_variables])]

    signature = [tf.TensorSpec([None, 4])] if dynamic else None
    run = step if jit is None else tf.function(step, jit_compile=jit, input_signature=signature)
    return [np.asarray(each) for each in run(tf.constant(random(rows, 4)))]


# Kernels sum another number of rows in another order, differently on each kind of CPU.
def assert_close(actual: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 5e-6) -> None:
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize("rows", [12, ROWS, 2])
def test_eager(rows: int) -> None:
    assert_close(gradients(accumulate_gradients(stack(), steps=4), rows), gradients(stack(), rows))


@pytest.mark.parametrize(
    ("rows", "steps", "options"),
    [
        (ROWS, 4, {"jit": False}),
        (ROWS, 4, {"jit": False, "dynamic": True}),
        (12, 4, {"jit": True, "dynamic": True}),
        (15, 4, {"jit": True}),
    ],
)
def test_graph(rows: int, steps: int, options: dict[str, bool]) -> None:
    layer = accumulate_gradients(stack(), steps=steps)
    assert_close(gradients(layer, rows, **options), gradients(stack(), rows, **options))


def sequence_model() -> Any:
    """Masked sequences with two outputs, one of them for each step in time, and moving state after the slices."""
    keras.utils.set_random_seed(6)
    tokens = keras.Input((4,), dtype="int32")
    hidden = layers.Embedding(9, 5, mask_zero=True)(tokens)
    hidden = layers.Dense(6, activation="tanh")(hidden)
    steps = layers.Dense(3, name="steps")(hidden)
    whole = layers.Dense(2, name="whole")(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(tokens, {"steps": steps, "whole": whole})


def sequences() -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 9, (ROWS, 4))
    tokens[::2, 2:] = 0
    targets = {"steps": generator.integers(0, 3, (ROWS, 4)), "whole": generator.integers(0, 2, ROWS)}
    weights = {"steps": generator.random((ROWS, 4)), "whole": generator.random(ROWS)}
    return tokens, targets, weights


def fitted(model: Any, reduction: str, **options: Any) -> list[np.ndarray]:
    losses = {
        name: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        for name in ("steps", "whole")
    }
    model.compile(
        keras.optimizers.SGD(0.1),
        losses,
        metrics={"steps": ["accuracy"]},
        weighted_metrics={"whole": ["accuracy"]},
    )
    tokens, targets, weights = sequences()
    history = model.fit(
        tokens, targets, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0, **options
    )
    assert int(model.optimizer.iterations) == 4, "one step a batch"
    return [*model.get_weights(), *(np.asarray(values) for values in history.history.values())]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_fit_with_masks_weights_and_two_outputs(reduction: str) -> None:
    if reduction == "mean_with_sample_weight" and not _has_reduction(reduction):
        pytest.skip("this Keras has no such reduction")
    actual = fitted(accumulate_gradients(sequence_model(), steps=3), reduction)
    assert_close(actual, fitted(sequence_model(), reduction), 1e-5)


def _has_reduction(name: str) -> bool:
    try:
        keras.losses.MeanSquaredError(reduction=name)
    except ValueError:
        return False
    return True


@accumulate_gradients(steps=3)
class Classifier(keras.Model):
    """Recomputed blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = recompute(keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(6)]))
        self.head = layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.block(x) + x)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_class_with_class_weights_and_loss_scaling(policy: str) -> None:
    found = []
    for steps in (3, 1):
        keras.config.set_dtype_policy(policy)
        try:
            keras.utils.set_random_seed(2)
            model = Classifier() if steps > 1 else _plain(Classifier())
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            x, y = random(ROWS, 6), np.arange(ROWS) % 2
            model.fit(x, y, batch_size=7, class_weight={0: 1.0, 1: 3.0}, shuffle=False, verbose=0)
        finally:
            keras.config.set_dtype_policy("float32")
        found.append(model.get_weights())
    assert_close(found[0], found[1], 1e-5 if policy == "float32" else 2e-3)


def _plain(model: Any) -> Any:
    """The same model, undecorated."""
    model.__class__ = type("Plain", (keras.Model,), {"call": Classifier.call.__wrapped__})
    del model.block.__dict__["call"]
    return model


def heads(seed: int = 3) -> Any:
    """Two outputs without masks, losses of layers, regularizers, moving statistics after the slices."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((4,))
    # Keras can't add up losses of half floats and others.
    regularizer = L2 if keras.config.dtype_policy().name == "float32" else None
    hidden = layers.Dense(8, activation="gelu", activity_regularizer=regularizer, kernel_regularizer=L2)(x)
    return keras.Model(x, {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})


def fitted_heads(model: Any, **options: Any) -> list[np.ndarray]:
    losses = {"a": "mse", "b": keras.losses.Huber()}
    optimizer = keras.optimizers.Adam(0.01)
    if keras.config.dtype_policy().name == "mixed_float16":
        # A batch may overflow where its slices don't, and then skips the step.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256)
    model.compile(optimizer, losses, loss_weights={"a": 0.3, "b": 2.0}, metrics=["mae", "mae"], **options)
    y = {"a": random(ROWS, 2), "b": random(ROWS, 1)}
    weights = {"a": np.linspace(0, 1, ROWS), "b": np.linspace(2, 1, ROWS)}
    history = model.fit(
        random(ROWS, 4), y, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return [*model.get_weights(), *(np.asarray(values) for values in history.history.values())]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_one_pass_where_the_loss_is_a_mean(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_pass(*_: Any, **__: Any) -> None:
        raise AssertionError("computed twice")

    keras.config.set_dtype_policy(policy)
    try:
        wanted = fitted_heads(heads())
        monkeypatch.setattr(accumulating, "replay_in_slices", second_pass)
        actual = fitted_heads(accumulate_gradients(heads(), steps=3))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_close(actual, wanted, 1e-5 if policy == "float32" else 5e-3)


def test_one_pass_under_xla() -> None:
    wanted = fitted_heads(heads(), jit_compile=True)
    assert_close(fitted_heads(accumulate_gradients(heads(), steps=4), jit_compile=True), wanted, 1e-5)


def test_eager_fit_with_arrays() -> None:
    wanted = fitted_heads(heads(), run_eagerly=True)
    assert_close(fitted_heads(accumulate_gradients(heads(), steps=3), run_eagerly=True), wanted, 1e-5)


def test_state_passes_from_slice_to_slice() -> None:
    """Moving statistics of each slice, other random numbers in each, the same ones in the backward pass."""
    x = tf.constant(random(6, 3))
    norm, drop = layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5, seed=1)
    block = accumulate_gradients(keras.Sequential([keras.Input((3,)), norm, drop]), steps=2)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x, training=True)
        return y, tape.gradient(y, norm.beta.value)

    seed = np.asarray(drop.seed_generator.state)
    y, of_beta = step()
    mean = 0.5 * x.numpy()[3:].mean(0) + 0.25 * x.numpy()[:3].mean(0)
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-5, atol=1e-6)
    kept = y.numpy() != 0.0
    assert not np.array_equal(kept[:3], kept[3:])
    np.testing.assert_array_equal(of_beta, 2.0 * kept.sum(0))
    assert np.asarray(drop.seed_generator.state)[1] == seed[1] + 2


def test_memory_with_recompute_model_and_files(tmp_path: Path) -> None:
    """Both together, on a Functional model, whose files stay."""
    model = accumulate_gradients(recompute_model(stack(), 2), steps=3)
    assert_close(gradients(model, ROWS, jit=False), gradients(stack(), ROWS, jit=False))
    model.save_weights(tmp_path / "sliced.weights.h5")
    model.save(tmp_path / "sliced.keras")
    bare = stack(seed=9)
    bare.load_weights(tmp_path / "sliced.weights.h5")
    loaded = keras.models.load_model(tmp_path / "sliced.keras")
    for each in (bare, loaded):
        assert_close(each.get_weights(), model.get_weights(), 0.0)


class Odd(layers.Layer):
    """Returns what `get` makes of its input."""

    def __init__(self, get: Any) -> None:
        super().__init__()
        self.get = get

    def call(self, x: Any) -> Any:
        return self.get(x)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_refusals(mode: str) -> None:
    def attempt(get: Any, x: Any = None) -> None:
        layer = accumulate_gradients(Odd(get), steps=2)

        def step() -> Any:
            with tf.GradientTape():
                return layer(tf.constant(random(4, 3)) if x is None else x)

        (step if mode == "eager" else tf.function(step))()

    with pytest.raises(ValueError, match=r"(?s)batch as their first axis; received outputs of shapes"):
        attempt(tf.reduce_sum)
    with pytest.raises(ValueError, match=r"(?s)received the operation RandomUniform"):
        attempt(lambda x: x + tf.random.uniform([3]))
    with pytest.raises(ValueError, match=r"(?s)sparse or ragged tensors can't be sliced"):
        attempt(lambda x: x, tf.ragged.constant([[1.0], [2.0, 3.0]]))


def test_wrong_arguments() -> None:
    for steps in (0, 2.0, True):
        with pytest.raises(ValueError, match=rf"at least 1; received {steps}"):
            accumulate_gradients(stack(), steps=steps)
    with pytest.raises(TypeError, match=r"accumulate_gradients takes a layer or model of Keras"):
        accumulate_gradients(3, steps=2)


def fit_on_ranks(sliced: bool) -> dict[str, Any]:
    """Slices, and windows of two batches, which reduce once."""
    import tfdist

    model = stack()
    if sliced:
        accumulate_gradients(model, steps=3)
    inner = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5))
    passes = 2 if tfdist.size() > 1 else 1
    model.compile(tfdist.DistributedOptimizer(inner, backward_passes_per_step=passes), "mse")
    # Two ranks with windows of two batches see together what one process sees at once.
    size = 16 // (passes * tfdist.size())
    data = tfdist.shard((random(32, 4), random(32, 5)), batch_size=size, shuffle=False)
    model.fit(data, epochs=2, verbose=0, callbacks=tfdist.callbacks.default())
    return {
        "weights": model.get_weights(),
        "digest": tfdist.check_in_sync(model),
        "iterations": int(model.optimizer.iterations),
    }


@on(("tf", 2))
def test_ranks_reduce_once_a_step(world: World) -> None:
    results = world.call(fit_on_ranks, True)
    expected = in_one_process(fit_on_ranks, False)
    assert results[0]["digest"] == results[1]["digest"]
    assert {result["iterations"] for result in results} == {expected["iterations"]} == {4}
    reductions = world.call(collectives_of_a_step)
    assert reductions[0]["sliced"] == reductions[0]["plain"] > 0


def collectives_of_a_step() -> dict[str, int]:
    """Collective operations in the traced train step, with slices and without."""
    import tfdist

    counts = {}
    for name in ("plain", "sliced"):
        model = stack() if name == "plain" else accumulate_gradients(stack(), steps=3)
        model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.optimizer.build(model.trainable_variables)
        step = tf.function(model.train_step)
        graph = step.get_concrete_function((tf.constant(random(6, 4)), tf.constant(random(6, 5)))).graph
        functions = [graph, *(graph._get_function(name).graph for name in graph._functions)]
        kinds = [operation.type for each in functions for operation in each.get_operations()]
        counts[name] = sum(kind.startswith("Collective") for kind in kinds)
    return counts
