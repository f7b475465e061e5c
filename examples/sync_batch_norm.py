"""Batch normalization over all processes: small batches per process, normalized as one large one.

tfdist run -np 2 examples/sync_batch_norm.py
"""

from __future__ import annotations

import argparse
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfdist

GOAL = 0.95
BATCH = 16  # of all processes together


def model_of_digits() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = order[:1440], order[1440:]

    model = tfdist.layers.sync_batch_norm(model_of_digits())
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(3e-3)),
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
