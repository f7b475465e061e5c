"""The networks of `tfdist bench memory`: one flat graph each, or blocks in `keras.RematScope`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# A network: (depth, rematerialized by Keras) -> model; and its batch: rows -> (x, y).
Network = tuple[Callable[[int, bool], Any], Callable[[int], tuple[Any, Any]]]


def _rematerialized(use: bool, names: Sequence[str] = ()) -> Any:
    """Layers made inside are recomputed by Keras, if `use`; all of them, or those of some names."""
    import keras

    if not use:
        return contextlib.nullcontext()
    if names:
        return keras.RematScope(mode="list_of_layers", layer_names=list(names))
    return keras.RematScope(mode="full")


def mlp(depth: int, remat: bool) -> Any:
    """`depth` dense layers of 256 units."""
    import keras

    names = [f"hidden_{i}" for i in range(depth)]
    with _rematerialized(remat, names):
        hidden = [keras.layers.Dense(256, activation="gelu", name=name) for name in names]
    return keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(1)])


def transformer(depth: int, remat: bool) -> Any:
    """`depth` encoder blocks: 64 tokens, width 64, 4 heads, with dropout."""
    import keras
    from keras import layers

    x = inputs = keras.Input((64, 64))
    for _ in range(depth):
        with _rematerialized(remat):
            normal = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, 16, dropout=0.1)(normal, normal)
            hidden = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dropout(0.1)(layers.Dense(64)(hidden))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def residual(depth: int, remat: bool) -> Any:
    """`depth` convolutions of 16 channels on 32 by 32 pixels, two in each block, with batch normalization."""
    import keras
    from keras import layers

    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(depth // 2):
        hidden = x
        with _rematerialized(remat):
            for _ in range(2):
                hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
                hidden = layers.Conv2D(16, 3, padding="same", use_bias=False)(hidden)
        x = x + hidden
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def _batch(*shape: int) -> Callable[[int], tuple[Any, Any]]:
    def make(rows: int) -> tuple[Any, Any]:
        return np.random.default_rng(0).standard_normal((rows, *shape)).astype("float32"), np.ones((rows, 1))

    return make


NETWORKS: dict[str, Network] = {
    "mlp": (mlp, _batch(256)),
    "transformer": (transformer, _batch(64, 64)),
    "residual": (residual, _batch(32, 32, 3)),
}
# Depth and rows of a batch.
USUAL = {"mlp": (24, 16384), "transformer": (24, 64), "residual": (50, 32)}
