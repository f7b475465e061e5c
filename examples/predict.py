"""Predicts and evaluates with all processes: each takes a share of the data, rank 0 gets the whole result.

tfdist run -np 2 examples/predict.py
"""

from __future__ import annotations

import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfdist


def main() -> int:
    tfdist.init()
    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-2)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    verbose = 2 if tfdist.rank() == 0 else 0
    model.fit(tfdist.shard((images, labels), batch_size=32), epochs=3, verbose=verbose)

    # Every rank gives the whole data and predicts its share; the rows come back in order.
    logits = tfdist.predict(model, images, gather="root", verbose=0)
    # Every rank evaluates its shard, unequal ones included; all get the metrics of the whole.
    measured = tfdist.evaluate(model, tfdist.shard((images, labels), shuffle=False), verbose=0)

    if logits is None:
        return 0
    accuracy = float(np.mean(np.argmax(logits, axis=1) == labels))
    equal = np.array_equal(logits, model.predict(images, verbose=0))
    print(f"{len(logits)} digits predicted by {tfdist.size()} processes, equal to one process: {equal}")
    print(f"Accuracy: {measured['accuracy']:.4f} measured, {accuracy:.4f} of the predictions")
    return 0 if equal and abs(measured["accuracy"] - accuracy) < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
