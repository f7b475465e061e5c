"""N ranks end where one process with the global batch ends: weights, slots, iterations; ranks bit-identical."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.equivalence import OPTIMIZERS, assert_equivalent, available
from tests.worlds import World, on

WORLDS = on(("horovod", 2), ("tf", 4), thorough=(("tf", 2), ("horovod", 4)))


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


@on(("horovod", 2), thorough=(("tf", 4),))
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
