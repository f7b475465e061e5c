"""One figure of `tfdist bench memory`, in a process of its own: `python -m tfdist.bench.memory_trial REQUEST`.

REQUEST is a JSON object: `network`, `depth`, `rows`, `contender`, `jit`, `steps`. Prints one as its last line:
`peak`, bytes above what the process had before the first step, and `seconds` and `cpu`, wall and processor time of
each step after the first.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from typing import Any

from tfdist.bench.memory_networks import NETWORKS
from tfdist.layers.peak_memory import PeakMemory


def main() -> int:
    """Measures; see the module."""
    request = json.loads(sys.argv[1])
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    make, batch = NETWORKS[request["network"]]
    model = prepared(make(request["depth"], request["contender"] == "remat"), request["contender"])
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=request["jit"])
    x, y = (tf.constant(part, tf.float32) for part in batch(request["rows"]))
    data = tf.data.Dataset.from_tensors((x, y)).repeat(request["steps"] + 1)
    ends: list[tuple[float, float]] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append((time.perf_counter(), time.process_time()))
    )
    memory = PeakMemory()
    with memory.measured():
        model.fit(data, verbose=0, callbacks=[clock])
    seconds, cpu = (
        [end - start for start, end in itertools.pairwise(moments)] for moments in zip(*ends, strict=True)
    )
    print(json.dumps({"peak": memory.peak, "seconds": seconds, "cpu": cpu}))
    return 0


def prepared(model: Any, contender: str) -> Any:
    """The model as a contender of the benchmark trains it."""
    from tfdist.layers import accumulate_gradients, recompute, recompute_model

    if contender in ("sqrt", "both"):
        recompute_model(model)
    elif contender == "each":
        for layer in model.layers:
            if layer.weights:
                recompute(layer)
    slices = re.fullmatch(r"k=(\d+)", "k=8" if contender == "both" else contender)
    return accumulate_gradients(model, steps=int(slices[1])) if slices else model


if __name__ == "__main__":
    sys.exit(main())
