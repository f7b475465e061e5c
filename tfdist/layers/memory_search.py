"""`fit_in_memory`: the least recomputation and the fewest slices with which training fits the memory given.

Problem: what a training step takes depends on the model, the batch, the optimizer, XLA and TensorFlow's
allocator; no formula knows it, and finding out by running out of memory takes the process down.

Solution: a few steps on a real batch, each choice in a process of its own, which is ended when it takes too much.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import cloudpickle
import keras

from tfdist.keras_compat.functional_graphs import graph_of
from tfdist.layers.accumulating import accumulate_gradients
from tfdist.layers.memory_sizes import bytes_of_text, text_of_bytes
from tfdist.layers.peak_memory import OVER
from tfdist.layers.recomputed_models import recompute_model

_TIMEOUT = 1800.0


def fit_in_memory(model: Any, batch: tuple[Any, Any], memory: str | int, *, most_steps: int = 64) -> Any:
    """Has a compiled model train within the memory given, by `recompute_model` and `accumulate_gradients`.

    Tries, in this order: the model as it is; recomputed blocks; those and 2, 4, 8, ... slices. Each in a fresh
    process, for three steps. The first that fits is applied to `model`, in place, and printed. Tried on CPUs; on a
    GPU the trial gets a device of that size and fits if it doesn't run out.

    Args:
        model: compiled and built, and such that `model.save` and `keras.models.load_model` restore it.
        batch: inputs and targets of one batch of full size, as for `model.train_on_batch`.
        memory: bytes for weights, gradients, slots and activations, or text such as "4GB"; what TensorFlow
            takes for itself comes on top.
        most_steps: the most slices to try.

    Returns:
        `model`.

    Raises:
        ValueError: nothing fits, or the model isn't compiled.
        RuntimeError: a trial failed, with what it said.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> batch = np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32")
        >>> model = tfdist.layers.fit_in_memory(model, batch, "2GB")  # doctest: +SKIP
        fit_in_memory: plain training takes 12.1 MB of 2.0 GB.
    """
    if not model.compiled or not model.built:
        raise ValueError(
            f"fit_in_memory takes a compiled and built model; received {model.name!r}, which isn't."
        )
    limit = bytes_of_text(memory)
    tried: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tfdist-memory-") as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        for recompute, steps in _choices(model, most_steps):
            words = _describe(recompute, steps)
            peak = _try(folder, path, model, batch, recompute, steps, limit)
            if peak is None:
                tried.append(words)
                continue
            print(
                f"fit_in_memory: {words} takes {text_of_bytes(peak)} of {text_of_bytes(limit)}.", flush=True
            )
            if recompute:
                recompute_model(model)
            if steps > 1:
                accumulate_gradients(model, steps=steps)
            model.train_function = None
            return model
    raise ValueError(
        f"No choice trains {model.name!r} within {text_of_bytes(limit)}; received memory={memory!r}, and tried: "
        f"{', '.join(tried)}. Give more memory, or a smaller batch or model."
    )


def _choices(model: Any, most_steps: int) -> Iterator[tuple[bool, int]]:
    yield False, 1
    cuts = graph_of(model) is not None
    if cuts:
        yield True, 1
    steps = 2
    while steps <= most_steps:
        yield cuts, steps
        steps *= 2


def _describe(recompute: bool, steps: int) -> str:
    parts = ["recomputed blocks"] * recompute + [f"{steps} slices"] * (steps > 1)
    return "training with " + " and ".join(parts) if parts else "plain training"


def _try(
    folder: str, path: str, model: Any, batch: tuple[Any, Any], recompute: bool, steps: int, limit: int
) -> int | None:
    """The peak in bytes; None if it is over the limit."""
    x, y = batch
    request = {
        "path": path,
        "custom_objects": _own_classes(model),
        "x": x,
        "y": y,
        "recompute": recompute,
        "steps": steps,
        "limit": limit,
    }
    file = os.path.join(folder, "request")
    with open(file, "wb") as opened:
        cloudpickle.dump(request, opened, protocol=pickle.DEFAULT_PROTOCOL)
    result = subprocess.run(
        [sys.executable, "-m", "tfdist.layers.memory_trial", file],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    # The kernel kills what takes all memory of the machine.
    if result.returncode in (OVER, -9, 137):
        return None
    if result.returncode != 0:
        raise RuntimeError(f"A trial of {model.name!r} failed, and said:\n{result.stderr[-3000:]}")
    return int(result.stdout.split()[-1])


def _own_classes(model: Any) -> dict[str, type]:
    """Classes that Keras doesn't have, under the name in the file."""
    kinds = {type(layer) for layer in model._flatten_layers()}
    own = [kind for kind in kinds if not kind.__module__.startswith("keras.")]
    return {keras.saving.get_registered_name(kind): kind for kind in own}
