"""A training loop without `fit()`: a gradient tape that combines gradients over all processes.

tfdist run -np 2 examples/custom_loop.py
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
    train, held_out = order[:1436], order[1436:]

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(1e-3 * tfdist.size())
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = tfdist.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    tfdist.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    batches = tfdist.shard((images[train], labels[train]), batch_size=arguments.batch_size)
    for epoch in range(arguments.epochs):
        losses = [step(x, y) for x, y in batches]
        loss = tfdist.allreduce(tf.reduce_mean(losses), name="epoch_loss")
        if tfdist.rank() == 0:
            print(f"Epoch {epoch + 1}: loss {float(loss):.4f}")

    fingerprint = tfdist.check_in_sync(model)
    predicted = np.argmax(model(images[held_out]), axis=-1)
    accuracy = float(np.mean(predicted == labels[held_out]))
    if tfdist.rank() == 0:
        print(f"Accuracy on {len(held_out)} held-out digits: {accuracy:.1%}; all ranks hold {fingerprint}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
