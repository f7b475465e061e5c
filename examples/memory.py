"""A deep network in less memory: blocks are computed again in the backward pass, and batches come in slices.

tfdist run -np 2 examples/memory.py
"""

from __future__ import annotations

import argparse
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfdist

GOAL = 0.95
DEPTH = 12
BATCH = 64  # of all processes together


def deep_network() -> keras.Model:
    x = inputs = keras.Input((64,))
    x = keras.layers.Dense(64)(x)
    for _ in range(DEPTH):
        hidden = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(64, activation="relu")(hidden)
        x = x + keras.layers.Dropout(0.1)(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = order[:1440], order[1440:]

    model = tfdist.layers.recompute_model(deep_network())
    model = tfdist.layers.accumulate_gradients(model, steps=2)
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(2e-3)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    batches = tfdist.shard((images[train], labels[train]), batch_size=BATCH // tfdist.size())
    model.fit(batches, epochs=arguments.epochs, verbose=2)

    fingerprint = tfdist.check_in_sync(model)
    _, accuracy = model.evaluate(images[held_out], labels[held_out], verbose=0)
    if tfdist.rank() == 0:
        print(f"Accuracy on {len(held_out)} held-out digits: {accuracy:.1%}; all ranks hold {fingerprint}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
