"""One trial of `fit_in_memory`, in a process of its own: `python -m tfdist.layers.memory_trial FILE`.

The file holds a pickled dict: `path` of the model's `.keras` file, its own classes as `custom_objects`, the batch
(`x`, `y`), `recompute`, `steps` and `limit` in bytes. Prints the peak in bytes as its last line; ends with the code
`OVER` when that passes the limit.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from typing import Any

_STEPS = 3  # the first traces, and the optimizer makes its slots


def main() -> int:
    """Trains for a few steps; see the module."""
    with open(sys.argv[1], "rb") as file:
        request: Mapping[str, Any] = pickle.load(file)

    import keras
    import tensorflow as tf

    from tfdist.layers.accumulating import accumulate_gradients
    from tfdist.layers.peak_memory import OVER, PeakMemory
    from tfdist.layers.recomputed_models import recompute_model

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=request["limit"] >> 20)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    tf.zeros([8, 8]) @ tf.zeros([8, 8])  # what TensorFlow takes for itself isn't the model's
    memory = PeakMemory(None if gpus else request["limit"])
    with memory.measured():
        model = keras.models.load_model(request["path"], custom_objects=request["custom_objects"])
        if request["recompute"]:
            recompute_model(model)
        if request["steps"] > 1:
            accumulate_gradients(model, steps=request["steps"])
        try:
            for _ in range(_STEPS):
                model.train_on_batch(request["x"], request["y"])
        except tf.errors.ResourceExhaustedError:
            return OVER
    if gpus:
        memory.peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    print(memory.peak)
    return 0


if __name__ == "__main__":
    sys.exit(main())
