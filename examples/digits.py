"""Trains a convolutional network on handwritten digits with several processes, and proves that it equals one.

    tfdist run -np 2 examples/digits.py
    tfdist run -np 1 --strategy "mirrored(devices=2)" examples/digits.py
    python examples/digits.py                 (alone: one process, same script)

All processes together train as one process with the global batch would. At the end rank 0 trains that one
process too, in plain Keras, and compares every weight. The script fails if they differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

RATE = 0.02
LIMIT = 1e-5


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1,797 images of 8 x 8 pixels; the last 361 of a fixed random order are held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16
    labels = labels[order]
    return (images[:1436], labels[:1436]), (images[1436:], labels[1436:])


def samples(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Single samples in an order that is new in each epoch, and the same in every process."""
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1)


def network() -> keras.Model:
    """Smooth activations: at the kink of a ReLU, rounding in the last digit can switch a unit on or off."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="gelu"),
            keras.layers.Conv2D(32, 3, activation="gelu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )


def compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per replica")
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    (x, y), held_out = digits()
    first = tfdist.rank() == 0

    with tfdist.scope():
        model = network()
        compiled(model, tfdist.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)))
    start = [weights.copy() for weights in model.get_weights()]
    model.fit(
        tfdist.shard(samples(x, y)).batch(arguments.batch_size),
        epochs=arguments.epochs,
        shuffle=False,  # the dataset shuffles itself
        verbose=1 if first else 0,
        callbacks=[
            tfdist.callbacks.BroadcastGlobalVariablesCallback(0),
            tfdist.callbacks.MetricAverageCallback(),
        ],
    )
    fingerprint = tfdist.check_in_sync(model)

    difference = 0.0
    _, accuracy = model.evaluate(*held_out, verbose=0)  # on every rank: under some strategies it is for all
    if first:
        print(f"Accuracy on {len(held_out[0])} held-out digits: {accuracy:.1%}")
        with tfdist.local():
            alone = compiled(network(), keras.optimizers.SGD(RATE, momentum=0.9))
            alone.set_weights(start)
            whole = samples(x, y).take(len(x) - len(x) % tfdist.size())
            batches = whole.batch(arguments.batch_size * tfdist.replicas())
            alone.fit(batches, epochs=arguments.epochs, shuffle=False, verbose=0)
        pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
        difference = max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
        verdict = "equal to" if difference <= LIMIT else "NOT equal to"
        print(
            f"Proof: all {tfdist.size()} ranks hold fingerprint {fingerprint}; their weights are {verdict} "
            f"those of one process with batch {arguments.batch_size * tfdist.replicas()} "
            f"(largest difference {difference:.1e}, limit {LIMIT:.0e})."
        )
    difference = tfdist.broadcast_object(difference, root_rank=0)
    return 0 if difference <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
