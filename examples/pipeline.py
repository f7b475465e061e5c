"""A network in two stages on two devices: GPUs, or else two halves of the CPU.

python examples/pipeline.py
"""

from __future__ import annotations

import argparse
import sys

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

GOAL = 0.95
STAGES = 2


def divide_cpu() -> None:
    """Before TensorFlow's first operation."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * STAGES)


def network() -> keras.Model:
    x = inputs = keras.Input((64,))
    x = keras.layers.Dense(64)(x)
    for _ in range(4):
        hidden = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(64, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    if len(tf.config.list_physical_devices("GPU")) < STAGES:
        divide_cpu()
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = order[:1440], order[1440:]

    pipe = tfdist.pipeline.Pipeline(network(), stages=STAGES, micro_batches=4, balance="time", batch_size=64)
    print(pipe.plan)
    pipe.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    pipe.fit(images[train], labels[train], batch_size=64, epochs=arguments.epochs, verbose=2)
    _, accuracy = pipe.evaluate(images[held_out], labels[held_out], verbose=0)
    print(f"Accuracy on {len(held_out)} held-out digits: {accuracy:.1%}, in {STAGES} stages")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
