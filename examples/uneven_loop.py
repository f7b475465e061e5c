"""A training loop without `fit()` in which ranks hold unequal data: those that run out join the others.

tfdist run -np 2 examples/uneven_loop.py
"""

from __future__ import annotations

import argparse
import sys

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

GOAL = 0.9


def rows_of_this_rank(rows: np.ndarray) -> np.ndarray:
    """As files of different length on each host: rank r has (r + 1) parts of the rows."""
    parts = np.array_split(rows, tfdist.size() * (tfdist.size() + 1) // 2)
    first = tfdist.rank() * (tfdist.rank() + 1) // 2
    return np.concatenate(parts[first : first + tfdist.rank() + 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    arguments = parser.parse_args()

    tfdist.init()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    rows, held_out = rows_of_this_rank(order[:1436]), order[1436:]

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3 * tfdist.size()))
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    tfdist.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    batches = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).shuffle(len(rows))
    batches = batches.batch(arguments.batch_size)
    for epoch in range(arguments.epochs):
        for x, y in batches:
            step(x, y)
        last = tfdist.join()  # this rank has no more data; the others may
        if tfdist.rank() == 0:
            print(f"Epoch {epoch + 1}: rank {last} had the most data")

    fingerprint = tfdist.check_in_sync(model)
    predicted = np.argmax(model(images[held_out]), axis=-1)
    accuracy = float(np.mean(predicted == labels[held_out]))
    if tfdist.rank() == 0:
        print(f"Accuracy on {len(held_out)} held-out digits: {accuracy:.1%}; all ranks hold {fingerprint}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
