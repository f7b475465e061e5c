"""N ranks end where one process with the global batch ends: weights, slots, iterations; ranks bit-identical."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest

from tests.distributed import bodies
from tests.worlds import World, on

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
WORLDS = on(("tf", 2), ("tf", 4), ("horovod", 2), ("horovod", 4))


def available(name: str) -> bool:
    import keras

    return hasattr(keras.optimizers, name)


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
    expected = _reference(json.dumps([args, options]))
    results = world.call(bodies.fit_with, list(args), options)
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    result = results[0]
    assert result["iterations"] == expected["iterations"] > 0
    assert max(result["moved"]) > 1e-4, "weights did not move"
    for actual, wanted in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=0)
    for actual, wanted in zip(result["slots"], expected["slots"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=1e-4)


@WORLDS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_on_a_dense_model(world: World, optimizer: str) -> None:
    if not available(optimizer):
        pytest.skip(f"this Keras has no {optimizer}")
    assert_equivalent(world, "dense", optimizer, OPTIMIZERS[optimizer])


@WORLDS
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("kind", ["convolution", "embedding", "transformer"])
def test_models(world: World, kind: str, optimizer: str) -> None:
    assert_equivalent(world, kind, optimizer, {"SGD": {"learning_rate": 0.1, "momentum": 0.9}}.get(optimizer))


OPTIONS: dict[str, dict[str, Any]] = {
    "run_eagerly": {"compile_options": {"run_eagerly": True}},
    "steps_per_execution": {"compile_options": {"steps_per_execution": 3}},
    "xla": {"compile_options": {"jit_compile": True}},
    "clipnorm": {"config": {"clipnorm": 0.02}},
    "global_clipnorm": {"config": {"global_clipnorm": 0.02}},
    "clipvalue": {"config": {"clipvalue": 0.002}},
    "weight_decay": {"config": {"weight_decay": 0.1}},
    "ema": {"config": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}},
    "keras_accumulation": {"config": {"gradient_accumulation_steps": 2}},
    "frozen_layer": {"freeze": 1},
    "one_bucket_per_tensor": {"wrap_options": {"bucket_bytes": 1}},
    "two_groups": {"wrap_options": {"groups": 2}},
    "predivide": {"wrap_options": {"gradient_predivide_factor": 2.0}},
    "passes": {"passes": 2},
    "passes_clipped": {"passes": 2, "config": {"global_clipnorm": 0.02}},
    "epochs": {"epochs": 3},
}


@on(("horovod", 2), ("tf", 4))
@pytest.mark.parametrize("option", OPTIONS)
def test_options(world: World, option: str) -> None:
    options = dict(OPTIONS[option])
    assert_equivalent(world, "dense", "AdamW", options.pop("config", {}), **options)


@on(("tf", 2), ("horovod", 2))
@pytest.mark.parametrize("option", ["run_eagerly", "xla", "global_clipnorm", "passes"])
def test_embedding_options(world: World, option: str) -> None:
    """Rows of a large table, duplicated within and across ranks, through every path."""
    options = dict(OPTIONS[option])
    assert_equivalent(world, "embedding", "Adam", options.pop("config", {}), **options)


@on(("tf", 2), ("horovod", 2))
@pytest.mark.parametrize("wrap_options", [{"compression": "fp16"}, {"compression": "bf16"}])
def test_compression_is_close(world: World, wrap_options: dict[str, Any]) -> None:
    assert_equivalent(
        world, "dense", "SGD", {"learning_rate": 0.1}, wrap_options=wrap_options, tolerance=2e-3
    )


@WORLDS
def test_mixed_precision(world: World) -> None:
    """`compile()` puts LossScaleOptimizer around the wrapper."""
    assert_equivalent(world, "dense", "SGD", {"learning_rate": 0.1}, policy="mixed_float16", tolerance=2e-3)


def test_no_optimizer_is_forgotten() -> None:
    import keras

    shipped = {
        name
        for name in dir(keras.optimizers)
        if isinstance(getattr(keras.optimizers, name), type)
        and issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)
    }
    assert shipped - {"Optimizer", "LossScaleOptimizer"} <= set(OPTIMIZERS)
