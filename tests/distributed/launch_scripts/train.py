"""A user's training script, the same for every launcher; prints one JSON line per rank. Argument: a seed."""

from __future__ import annotations

import json
import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.source_tree import expose_callbacks
from tfdist import world

expose_callbacks()


def main(seed: int) -> None:
    first = [tfdist.ProcessSet([0])] if "TESTED_SETS" in os.environ else []
    tfdist.init(process_sets=first)
    keras.utils.set_random_seed(seed + tfdist.rank())  # ranks start differently, and rank 0's start counts
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((64, 6)).astype("float32"), random.integers(0, 3, 64)
    history = model.fit(
        tfdist.shard((x, y), batch_size=8, seed=seed),
        epochs=2,
        verbose=0,
        callbacks=[
            tfdist.callbacks.BroadcastGlobalVariablesCallback(0),
            tfdist.callbacks.MetricAverageCallback(),
        ],
    )
    spec = world.current().spec
    record = {
        "rank": tfdist.rank(),
        "size": tfdist.size(),
        "local": [tfdist.local_rank(), tfdist.local_size()],
        "cross": [tfdist.cross_rank(), tfdist.cross_size()],
        "backend": tfdist.backend(),
        "mpi": tfdist.mpi_enabled(),
        "launcher": spec.launcher,
        "job": spec.job,
        "fingerprint": tfdist.check_in_sync(model),
        "weights": float(sum(abs(weights).sum() for weights in model.get_weights())),
        "steps": int(model.optimizer.iterations),
        "loss": history.history["loss"][-1],
        "prefix": sys.prefix,
        "folder": os.getcwd(),
        "inherited": _inherited(),
        "sets": _sets(first),
    }
    # One write per line: some launchers mix the bytes of their ranks.
    os.write(1, (json.dumps(record) + "\n").encode())


def _sets(first: list[tfdist.ProcessSet]) -> list[str]:
    """Sums over a set of the start, and over one added after training."""
    said = []
    try:
        for process_set in first and [*first, tfdist.add_process_set([1])]:
            if process_set.included():
                time.sleep(1.0 if process_set.ranks == [1] else 0.0)  # rank 0 has ended by then
                total = tfdist.allreduce(tf.constant(7.0), op=tfdist.Sum, process_set=process_set)
                said.append(f"{process_set.process_set_id}: {float(total)}")
    except tfdist.TfdistError as error:
        said.append(str(error))
    return said


def _inherited() -> str:
    """From a module that only PYTHONPATH leads to."""
    try:
        import module_on_the_path  # type: ignore[import-not-found]
    except ImportError:
        return "nothing"
    return str(module_on_the_path.TEXT)


if __name__ == "__main__":
    main(int(sys.argv[1]))
