"""One figure of `tfdist bench memory`, in a process of its own: `python -m tfdist.bench.memory_trial REQUEST`.

REQUEST is a JSON object: `network`, `depth`, `rows`, `contender`, `jit`, `steps`. Prints one as its last line:
`peak`, bytes above what the process had after a first step with few rows, which traces and makes what stays; and
`seconds` and `cpu`, wall and processor time of each step after the first of full size.
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

_FEW = 8  # rows


def main() -> int:
    """Measures; see the module."""
    request = json.loads(sys.argv[1])
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    make, batch = NETWORKS[request["network"]]
    model = prepared(make(request["depth"], request["contender"] == "remat"), request["contender"])
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=request["jit"])
    few, full = (
        tf.data.Dataset.from_tensors(tuple(tf.constant(part, tf.float32) for part in batch(rows)))
        for rows in (_FEW, request["rows"])
    )
    ends: list[tuple[float, float]] = []
    memory = PeakMemory()

    def end(number: int, logs: Any) -> None:
        if number == 0:
            memory.restart()
        else:
            ends.append((time.perf_counter(), time.process_time()))

    with memory.measured():
        clock = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        # Concatenated, batches have no static size, so that one trace serves both.
        model.fit(few.concatenate(full.repeat(request["steps"] + 1)), verbose=0, callbacks=[clock])
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
