"""`bodies.fit` in a world against one process: equal weights, slots and iterations; ranks bit-identical."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from tests.distributed import bodies
from tests.worlds import World

# Every optimizer that Keras ships; a new one that is not here fails `test_no_optimizer_is_forgotten`.
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"learning_rate": 0.01},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.1},
    "Adamax": {},
    "Adafactor": {},
    "Nadam": {},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {},
    "Lamb": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
    "MultiOptimizer": {},
}


def available(name: str) -> bool:
    """Whether this Keras has the optimizer, and it trains there: before Keras 3.13 Muon fails on TensorFlow."""
    import keras

    if name == "Muon" and hasattr(keras.optimizers, name):
        return hasattr(keras.optimizers.Muon(), "adam_weight_decay")
    return hasattr(keras.optimizers, name if name != "MultiOptimizer" else "OptimizerMap")


@functools.cache
def _reference(arguments: str) -> dict[str, Any]:
    import tfdist

    args, options = json.loads(arguments)
    tfdist.init()
    try:
        return bodies.fit(*args, **options)
    finally:
        tfdist.shutdown()


def assert_equivalent(world: World, *args: Any, tolerance: float = 1e-5, **options: Any) -> None:
    alone = {name: option for name, option in options.items() if name != "strategy"}
    expected = _reference(json.dumps([args, alone]))
    results = world.call(bodies.fit_with, list(args), options)
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    result = results[0]
    assert result["iterations"] == expected["iterations"] > 0
    assert max(result["moved"]) > 1e-4, "weights did not move"
    for actual, wanted in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=0)
    for place, wanted in enumerate(expected["slots"]):
        kept = [result["slots"][place] for result in results if result["slots"][place] is not None]
        assert kept, "nobody keeps this slot"
        for actual in kept:
            np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=1e-4)
