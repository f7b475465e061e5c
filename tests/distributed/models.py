"""Small models whose every trainable value has a true gradient, and their data, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 4
GLOBAL_BATCH = 16


def dense() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def convolution() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(4, 3, activation="tanh"),
            keras.layers.DepthwiseConv2D(3),
            keras.layers.LayerNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def embedding(table: Any = None) -> Any:
    """Table large enough to travel as rows rather than whole."""
    import keras

    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            (table or keras.layers.Embedding)(70_000, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(3),
        ]
    )


def transformer(table: Any = None) -> Any:
    import keras

    inputs = keras.Input((5,), dtype="int32")
    x = (table or keras.layers.Embedding)(30, 8)(inputs)
    # No biases: the key bias has no true gradient, and Adam-like optimizers amplify its rounding.
    attended = keras.layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)
    x = keras.layers.LayerNormalization()(x + attended)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(8, activation="gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))


def reference(kind: str) -> Any:
    """The same model for one process of plain Keras.

    Keras does not sum the rows of a token that occurs several times before it updates, so lookups are replaced
    by the matrix product that they stand for.
    """
    import keras

    class OneHotEmbedding(keras.layers.Embedding):
        def call(self, inputs: Any) -> Any:
            return keras.ops.matmul(keras.ops.one_hot(inputs, self.input_dim), self.embeddings)

    return MODELS[kind](OneHotEmbedding) if kind in ("embedding", "transformer") else MODELS[kind]()


MODELS: dict[str, Callable[..., Any]] = {
    "dense": dense,
    "convolution": convolution,
    "embedding": embedding,
    "transformer": transformer,
}


def data(kind: str, steps: int = STEPS, batch: int = GLOBAL_BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and class labels for `steps` global batches."""
    random = np.random.default_rng(7)
    rows = steps * batch
    labels = random.integers(0, 3, rows)
    if kind == "dense":
        return random.standard_normal((rows, 6)).astype("float32"), labels
    if kind == "convolution":
        return random.standard_normal((rows, 8, 8, 2)).astype("float32"), labels
    # Few distinct tokens: rows that occur several times in a batch, and on several ranks.
    return random.integers(0, 12, (rows, 5)), labels


def part(values: np.ndarray, rank: int, size: int, batch: int = GLOBAL_BATCH) -> np.ndarray:
    """Rows of `rank`: its share of every global batch, in order."""
    shares = values.reshape(-1, size, batch // size, *values.shape[1:])
    return shares[:, rank].reshape(-1, *values.shape[1:])
