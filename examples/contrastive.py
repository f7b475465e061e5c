"""A loss that compares all samples of the batch, over all processes: rank 0 computes it from all ranks' outputs.

tfdist run -np 2 --strategy "parameter_server(server_loss=True)" examples/contrastive.py
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

import tfdist

GOAL = 0.95
BATCH = 256  # of all processes together


class SupervisedContrastive(keras.losses.Loss):
    """Pulls samples of a class together and pushes all others away (Khosla et al. 2020)."""

    def call(self, labels: Any, points: Any) -> Any:
        labels = ops.reshape(labels, [-1])
        itself = ops.eye(ops.shape(labels)[0])
        alike = ops.cast(labels[:, None] == labels[None, :], "float32") - itself
        similarity = ops.matmul(points, ops.transpose(points)) / 0.1 - 1e9 * itself
        chosen = ops.sum(alike * (similarity - ops.logsumexp(similarity, axis=1, keepdims=True)), axis=1)
        return -chosen / ops.maximum(ops.sum(alike, axis=1), 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = order[:1440], order[1440:]

    encoder = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(32),
            keras.layers.UnitNormalization(),
        ]
    )
    encoder.compile(tfdist.DistributedOptimizer(keras.optimizers.Adam(3e-3)), SupervisedContrastive())
    batches = tfdist.shard((images[train], labels[train]), batch_size=BATCH // tfdist.replicas())
    encoder.fit(batches, epochs=arguments.epochs, verbose=2)

    fingerprint = tfdist.check_in_sync(encoder)
    points, own = encoder.predict(images[train], verbose=0), labels[train]
    centres = np.stack([points[own == digit].mean(0) for digit in range(10)])
    nearest = np.argmax(encoder.predict(images[held_out], verbose=0) @ centres.T, axis=1)
    accuracy = float(np.mean(nearest == labels[held_out]))
    if tfdist.rank() == 0:
        print(f"Accuracy on {len(held_out)} held-out digits: {accuracy:.1%}; all ranks hold {fingerprint}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
