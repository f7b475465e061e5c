"""Layers for the tests of recompute, and what one training step with them comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.src.backend.common import global_state

from tfdist.layers import recompute

STEPS = {
    "eager": lambda step: step,
    "graph": tf.function,
    "XLA": lambda step: tf.function(step, jit_compile=True),
}


class Case(NamedTuple):
    """A layer, and what to call it with.

    Attributes:
        make: makes the layer.
        argument: the first one, a numpy array or a structure of them.
        keywords: keyword arguments.
        policy: dtype policy.
    """

    make: Callable[[], Any]
    argument: Any
    keywords: dict[str, Any] = {}  # noqa: RUF012
    policy: str = "float32"


class Noisy(layers.Layer):
    """Takes `training` from the call context, draws from Keras's global seed, and adds a loss."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            x = x * keras.random.uniform(keras.ops.shape(x), 0.5, 1.5, dtype=x.dtype)
        self.add_loss(keras.ops.mean(x**2))
        return x


class Weighted(layers.Layer):
    """Has weights of its own, a counter, and a keyword argument."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x: Any, *, power: float = 1.0, shift: Any = None, training: bool = False) -> Any:
        self.count.assign(self.count + 1.0)
        y = (x * self.scale) ** 2 * power
        return y if shift is None else y + shift * self.scale


class Nested(layers.Layer):
    """Takes and returns structures, some of it no tensors; makes layers when it is built, and one late."""

    def build(self, shapes: Any) -> None:
        self.inner = [layers.Dense(3), layers.Dropout(0.4)]
        self.late = layers.Dense(2)
        for layer in self.inner:
            layer.build(shapes["a"])

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.inner[1](self.inner[0](x["a"]), training=training)
        return {"y": [self.late(hidden), x["b"][0] + 1], "none": None, "name": "text"}


class Tied(layers.Layer):
    """Reads a weight of a layer that Keras doesn't know to be a part of it."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.get_other = lambda: other

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x @ keras.ops.transpose(self.get_other().kernel))


class SharesAndTies(layers.Layer):
    """Calls one layer twice, and one that reads the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = layers.Dense(4, activation="tanh")
        self.tied = Tied(self.shared)

    def build(self, shape: Any) -> None:
        self.shared.build(shape)

    def call(self, x: Any) -> Any:
        return self.tied(self.shared(self.shared(x)))


class Recurrent(layers.Layer):
    """Embedding with a mask, a recurrent layer with dropout, in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [
            layers.Embedding(7, 4, mask_zero=True),
            layers.LSTM(4, return_sequences=True, dropout=0.2, recurrent_dropout=0.2),
        ]

    def call(self, x: Any, training: bool = False) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def convolutional() -> Any:
    return keras.Sequential(
        [
            layers.Conv2D(4, 3, kernel_regularizer="l2", activity_regularizer="l1"),
            layers.BatchNormalization(momentum=0.5),
            layers.ReLU(),
            layers.SpatialDropout2D(0.3),
            layers.GroupNormalization(2),
        ]
    )


def attention() -> Any:
    x = keras.Input((5, 4))
    hidden = layers.Masking()(x)
    attended = layers.MultiHeadAttention(2, 3, dropout=0.2)(hidden, hidden)
    return keras.Model(x, layers.LayerNormalization()(layers.Add()([hidden, attended])))


def padded() -> np.ndarray:
    x = random(3, 5, 4)
    x[0, 3:] = 0.0
    return x


def noise_around_weights() -> Any:
    return keras.Sequential([Weighted(), Noisy(), layers.GaussianDropout(0.2), Weighted()])


def frozen() -> Any:
    model = convolutional()
    model.layers[1].trainable = False
    return model


TOKENS = np.array([[1, 2, 0], [3, 3, 6]])

CASES = {
    "convolution, moving statistics, dropout, regularizers": Case(convolutional, random(3, 6, 6, 2)),
    "frozen": Case(frozen, random(3, 6, 6, 2)),
    "global seed, training of the context, added loss": Case(Noisy, random(4, 3)),
    "keyword arguments": Case(Weighted, random(4, 3), {"power": 0.5, "shift": random(1, 3)}),
    "nested": Case(Nested, {"a": random(4, 3), "b": [np.array([1, 2])]}),
    "shared, and a weight of another layer": Case(SharesAndTies, random(3, 4)),
    "embedding, masks, LSTM": Case(Recurrent, TOKENS),
    "attention with a mask": Case(attention, padded()),
    "weights that are assigned": Case(lambda: layers.SpectralNormalization(layers.Dense(3)), random(4, 3)),
    "mixed bfloat16": Case(noise_around_weights, random(4, 3), policy="mixed_bfloat16"),
    "mixed float16": Case(noise_around_weights, random(4, 3), policy="mixed_float16"),
    "float64": Case(noise_around_weights, random(4, 3), policy="float64"),
}


def plain(layer: Any) -> Any:
    return layer


def by_class(layer: Any) -> Any:
    """Recomputes as if the layer's class had been decorated."""
    kind = type(layer)
    layer.__class__ = recompute(type(kind.__name__, (kind,), {"__module__": kind.__module__}))
    return layer


def training_steps(case: Case, form: Callable[[Any], Any], mode: str, count: int = 2) -> list[np.ndarray]:
    """Outputs, masks, losses, gradients and state of some steps."""
    keras.config.set_dtype_policy(case.policy)
    try:
        keras.utils.set_random_seed(11)
        # Before Keras 3.13 that left the global seed where it was.
        global_state.set_global_attribute("global_seed_generator", None)
        layer = form(case.make())
        outer = Outer(layer, case.keywords)
        argument = keras.tree.map_structure(tf.constant, case.argument)
        outer(argument)

        def step() -> Any:
            floats = [each for each in keras.tree.flatten(argument) if each.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                outputs = outer(argument, training=True)
                tensors = [each for each in keras.tree.flatten(outputs) if tf.is_tensor(each)]
                masks = [getattr(each, "_keras_mask", None) for each in tensors]
                total = sum(
                    tf.reduce_mean(tf.cast(each, "float64") ** 2)
                    for each in tensors
                    if each.dtype.is_floating
                )
                total += sum(tf.cast(loss, "float64") for loss in outer.losses)
            gradients = tape.gradient(total, [*floats, *layer.trainable_variables])
            present = [tf.convert_to_tensor(each) for each in gradients if each is not None]
            return [total, *tensors, *(mask for mask in masks if mask is not None), *present]

        run = STEPS[mode](step)
        results = [run() for _ in range(count)]
        state = [variable.value for variable in layer.non_trainable_variables]
        return [
            np.asarray(tf.cast(each, "float64"))
            for each in keras.tree.flatten([results, state, len(outer.losses)])
        ]
    finally:
        keras.config.set_dtype_policy("float32")


class Outer(keras.Model):
    """Calls a layer, with some arguments, without `training`, which that finds in the call context."""

    def __init__(self, layer: Any, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        self.get_keywords = lambda: keywords

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.layer(x, **self.get_keywords())
