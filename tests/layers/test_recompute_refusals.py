"""What can't be recomputed raises where it is traced, with the operation and the fix."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdist.layers import recompute

X = np.ones((2, 3), "float32")
_variable = tf.Variable(2.0)
_generator = tf.random.Generator.from_seed(1)
_draw = tf.function(lambda x: x + tf.random.normal([3]))
_draw(tf.constant(X))


class Calls(layers.Layer):
    """Calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.get_function = lambda: function
        self.dense = layers.Dense(3)
        self.drop = layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.get_function()(x)


def gradient(layer: Any, mode: str) -> Any:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(layer(x, **({"training": True} if layer._call_has_training_arg else {})))
        return tape.gradient(y, x)

    return (tf.function(step) if mode == "graph" else step)(tf.constant(X))


def assigned(x: Any) -> Any:
    _variable.assign_add(1.0)
    return x


REFUSED = {
    "RandomStandardNormal": (lambda x: x + tf.random.normal([3]), "keras.random.SeedGenerator"),
    "RandomUniform": (lambda x: tf.nn.dropout(x, 0.5), "keras.random.SeedGenerator"),
    "RandomStandardNormal.*Calls": (_draw, "keras.random.SeedGenerator"),
    "RngReadAndSkip|StatefulUniform": (
        lambda x: x + _generator.uniform([3]),
        "keras.random.SeedGenerator",
    ),
    "EagerPyFunc": (lambda x: tf.py_function(lambda y: y, [x], tf.float32), "Call it outside"),
    "PyFunc": (lambda x: tf.numpy_function(lambda y: y, [x], tf.float32), "Call it outside"),
    "ReadVariableOp": (lambda x: x * _variable, "add_weight"),
    "AssignAddVariableOp": (assigned, "add_weight"),
    "RandomUniform.*": (
        lambda x: tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: [y + tf.random.uniform([])], [x])[
            0
        ],
        "keras.random.SeedGenerator",
    ),
}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("operation", REFUSED)
def test_what_does_not_do_the_same_again(operation: str, mode: str) -> None:
    if (operation, mode) == ("PyFunc", "eager"):
        pytest.skip("TensorFlow calls it at once, and makes no operation of it")
    function, fix = REFUSED[operation]
    with pytest.raises(ValueError, match=rf"(?s)received the operation ({operation}).*({fix})"):
        gradient(recompute(Calls(function)), mode)
    gradient(Calls(function), mode)


def test_harmless_operations_pass() -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [5.0]), 0.0)

    def function(x: Any) -> Any:
        tf.debugging.assert_all_finite(x, "finite")
        return x * table.lookup(tf.constant(1))

    np.testing.assert_array_equal(gradient(recompute(Calls(function)), "graph"), np.full_like(X, 5.0))


def test_assignment_inside_a_loop() -> None:
    class Looping(Calls):
        def call(self, x: Any) -> Any:
            body = lambda y: [self.drop(y, training=True)]  # noqa: E731
            return tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, body, [x], maximum_iterations=2)[0]

    with pytest.raises(ValueError, match=r"(?s)inside a loop.*seed_generator_state.*Recompute the body"):
        gradient(recompute(Looping(abs)), "graph")


def test_inner_function_with_weights() -> None:
    class Inner(Calls):
        def __init__(self) -> None:
            super().__init__(abs)
            self.get_traced = tf.function(lambda x: self.dense(x))

        def call(self, x: Any) -> Any:
            return self.get_traced(x)

    with pytest.raises(ValueError, match=r"(?s)can't hold a tf.function that uses variables.*kernel"):
        gradient(recompute(Inner()), "graph")
    # Traced before, it reads them by itself.
    layer = Inner()
    layer(X)
    with pytest.raises(ValueError, match=r"received the operation ReadVariableOp"):
        gradient(recompute(layer), "graph")


def test_variables_made_in_the_call() -> None:
    class Late(Calls):
        def call(self, x: Any) -> Any:
            return keras.random.normal((3,), seed=keras.random.SeedGenerator(1)) + x

    with pytest.raises(
        ValueError, match=r"(?s)can't make variables when it is called.*attribute of the layer"
    ):
        gradient(recompute(Late(abs)), "eager")


def test_overridden_call() -> None:
    @recompute
    class Parent(Calls):
        pass

    class Inherits(Parent):
        pass

    class Overrides(Parent):
        def call(self, x: Any) -> Any:
            return super().call(x) * 2.0

    assert gradient(Inherits(tf.square), "eager") is not None
    with pytest.raises(ValueError, match=r"received Overrides, which overrides the `call` of Parent"):
        gradient(Overrides(tf.square), "eager")
    runs: list[int] = []

    def count(x: Any) -> Any:
        runs.append(1)
        return tf.square(x)

    np.testing.assert_array_equal(gradient(recompute(Overrides)(count), "eager"), 4.0 * X)
    assert len(runs) == 2, "the block of the parent is not recomputed inside that of the subclass"


def test_wrong_argument() -> None:
    with pytest.raises(TypeError, match=r"takes a layer or model of Keras.*received 3"):
        recompute(3)


def test_twice_is_once() -> None:
    layer = recompute(Calls(tf.square))
    call = layer.call
    assert recompute(layer).call is call
    kind = recompute(type("Own", (Calls,), {}))
    call = kind.call
    assert recompute(kind).call is call


def test_copies_are_plain() -> None:
    model = keras.Sequential([keras.Input((3,)), recompute(layers.Dense(2))])
    for copied in (keras.models.clone_model(model), pickle.loads(pickle.dumps(model))):
        assert "call" not in copied.layers[0].__dict__
