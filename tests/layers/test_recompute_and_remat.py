"""One test for each fault of `keras.RematScope` on TensorFlow, which `recompute` doesn't have.

Each also shows that the fault is still there: it fails once Keras mends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.layers.recomputed import plain, random
from tfdist.layers import recompute

pytestmark = pytest.mark.skipif(not hasattr(keras, "RematScope"), reason="this Keras has no RematScope")
X = random(8, 4)


class OwnWeights(layers.Layer):
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x @ self.kernel)


class FromContext(layers.Layer):
    """Has a layer, not in Keras's scope itself, that finds `training` in the call context."""

    def __init__(self) -> None:
        super().__init__()
        with keras.RematScope(mode=None):
            self.scale = layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        self.scale.build(shape)

    def call(self, x: Any) -> Any:
        return self.scale(x) ** 2


def by_keras(make: Callable[[], Any]) -> Any:
    with keras.RematScope(mode="full"):
        return make()


def ours(make: Callable[[], Any]) -> Any:
    return recompute(make())


def undecorated(make: Callable[[], Any]) -> Any:
    return plain(make())


def step(form: Callable[[Any], Any], make: Callable[[], Any], *, graph: bool = False) -> list[np.ndarray]:
    """Gradients of one step, and the state after it."""
    keras.utils.set_random_seed(2)
    layer = form(make)
    model = keras.Sequential([keras.Input((4,)), layer])

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cast(model(x, training=True), tf.float32)
            loss = tf.reduce_sum(y**3) + sum(model.losses)
        return tape.gradient(loss, [x, *layer.trainable_variables])

    gradients = (tf.function(run) if graph else run)(tf.constant(X))
    return [np.asarray(each) for each in (*gradients, *layer.non_trainable_variables)]


def differ(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return any(not np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True))


def assert_mended(make: Callable[[], Any]) -> None:
    wanted = step(undecorated, make)
    for actual, expected in zip(step(ours, make), wanted, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert differ(step(by_keras, make), wanted), "Keras does it right now"


def test_keyword_arguments_in_graph_mode() -> None:
    def make() -> Any:
        return layers.Dropout(0.5, seed=1)

    assert not differ(step(ours, make, graph=True), step(undecorated, make, graph=True))
    with pytest.raises(ValueError, match="keyword"):
        step(by_keras, make, graph=True)


def test_dropout_draws_the_same_mask() -> None:
    assert_mended(lambda: layers.Dropout(0.5, seed=1))


def test_training_of_the_call_context() -> None:
    assert_mended(FromContext)


def test_state_is_updated_once() -> None:
    def make() -> Any:
        return layers.BatchNormalization(momentum=0.5)

    assert_mended(make)
    once, twice = step(ours, make)[-2], step(by_keras, make)[-2]
    np.testing.assert_allclose(once, 0.5 * X.mean(0), atol=1e-6)
    np.testing.assert_allclose(twice, 0.75 * X.mean(0), atol=1e-6)


def test_own_weights_in_mixed_precision() -> None:
    def make() -> Any:
        return OwnWeights(dtype="mixed_bfloat16")

    for actual, wanted in zip(step(ours, make), step(undecorated, make), strict=True):
        np.testing.assert_array_equal(actual, wanted)
    with pytest.raises(Exception, match=r"float32|bfloat16"):
        step(by_keras, make)


def test_activity_regularizers() -> None:
    def make() -> Any:
        inner = layers.Dense(3, activity_regularizer="l2")
        return keras.Sequential([inner, layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))])

    assert_mended(make)


def test_weights_are_read_once() -> None:
    """A second read in the backward pass may come after the update; so there is none."""
    layer = recompute(layers.Dense(3))
    layer.build((None, 4))

    @tf.function
    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.trainable_variables)

    kinds = [operation.type for operation in run.get_concrete_function(tf.constant(X)).graph.get_operations()]
    reads = kinds.count("ReadVariableOp")
    assert kinds.count("MatMul") >= 3, "forward, again, and backward"
    seed = 1
    assert reads <= len(layer.trainable_variables) + seed
