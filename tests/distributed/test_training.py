"""The ways in which users train, each against one process; see `training.py` for what the ranks run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import training
from tests.worlds import World, in_one_process, on

WORLDS = on(("horovod", 2), ("tf", 4))
PAIRS = on(("horovod", 2), thorough=(("tf", 2),))
FEW = on(("horovod", 2), thorough=(("tf", 4),))


alone = functools.cache(in_one_process)


def assert_as_one_process(
    world: World, function: Callable[..., dict[str, Any]], *args: Any
) -> list[dict[str, Any]]:
    expected = alone(function, *args)
    results: list[dict[str, Any]] = world.call(function, *args)
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert results[0]["iterations"] == expected["iterations"] > 0
    assert max(results[0]["moved"]) > 1e-4
    for key in ("weights", "slots"):
        for actual, wanted in zip(results[0][key], expected[key], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)
    return results


@WORLDS
def test_train_on_batch_of_an_unbuilt_model(world: World) -> None:
    assert_as_one_process(world, training.train_on_batch)


@FEW
@pytest.mark.parametrize("kind", ["apply", "apply_gradients", "tape", "apply eager", "tape eager"])
def test_custom_loop(world: World, kind: str) -> None:
    assert_as_one_process(world, training.custom_loop, kind)


@WORLDS
def test_inputs_outputs_and_frozen_layers(world: World) -> None:
    assert_as_one_process(world, training.structures)


@WORLDS
def test_ragged_last_batch(world: World) -> None:
    assert_as_one_process(world, training.ragged_last_batch)


@PAIRS
@pytest.mark.parametrize("order", ["same", "swapped"])
def test_two_optimizers(world: World, order: str) -> None:
    assert_as_one_process(world, training.two_optimizers, order)


@PAIRS
def test_resume_from_a_file(world: World) -> None:
    assert_as_one_process(world, training.wrapped_after_build_and_resumed)


@PAIRS
@pytest.mark.parametrize("kind", ["asked", "auto", "own train_step"])
def test_xla_is_kept_out_of_collectives(world: World, kind: str) -> None:
    results = assert_as_one_process(world, training.xla, kind)
    told = [result["printed"].count("tfdist: jit_compile") for result in results]
    assert told == [1] + [0] * (world.size - 1), "rank 0 says it, once"
    assert ("overrides train_step" in results[0]["printed"]) == (kind == "own train_step")
    assert all(result["jit_compile"] for result in results)


@FEW
@pytest.mark.parametrize("order", ["loss scale outside", "loss scale inside"])
def test_float16_with_everything_else(world: World, order: str) -> None:
    expected = alone(training.all_together, order)
    results: list[dict[str, Any]] = world.call(training.all_together, order)
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert results[0]["iterations"] == expected["iterations"] == 8
    assert max(results[0]["moved"]) > 1e-2
    for actual, wanted in zip(results[0]["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, wanted, atol=2e-3)


@on(("tf", 4), ("horovod", 4))
def test_process_sets_train_models_of_their_own(world: World) -> None:
    results: list[dict[str, Any]] = world.call(training.in_a_process_set, None)
    for backwards in (False, True):
        expected = alone(training.in_a_process_set, backwards)
        first, second = results[int(backwards)], results[int(backwards) + 2]
        assert first["digest"] == second["digest"], "ranks of a set differ"
        for actual, wanted in zip(first["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)
    assert results[0]["digest"] != results[1]["digest"]


@FEW
@pytest.mark.parametrize("order", ["loss scale outside", "loss scale inside"])
def test_overflow_of_one_rank_skips_the_step_on_all(world: World, order: str) -> None:
    histories = [result["history"] for result in world.call(training.overflow_on_one_rank, order)]
    assert all(history == histories[0] for history in histories)
    mean = (world.size + 1) / 2
    first, second, third = histories[0]
    np.testing.assert_allclose(first[0], [1 - 0.5 * mean, 2 + 0.5 * mean])
    assert first[1:] == (8.0, 1)
    assert second == (first[0], 4.0, 1), "skipped on every rank, scale halved"
    np.testing.assert_allclose(third[0], [1 - mean, 2 + mean])
    assert third[1:] == (4.0, 2)


@PAIRS
def test_what_would_drift_is_refused(world: World) -> None:
    for said in world.call(training.refusals):
        for name in ("plain", "loaded"):
            assert said[name].startswith("OutOfSyncError"), said[name]
            assert "its optimizer is a plain Adam" in said[name]
            assert "tfdist.load_model" in said[name]
        assert said["bypass"].startswith("OutOfSyncError"), said["bypass"]
        assert "train_step of Bypass" in said["bypass"]
        assert said["local"] == "1 epoch"


def test_shutdown_undoes_the_hook(fresh_world: Callable[..., World]) -> None:
    world = fresh_world("tf", 2)
    assert world.call(training.hook_is_undone) == [[True, False, False]] * 2


def test_train_functions_of_another_time_are_made_anew(
    fresh_world: Callable[..., World], tmp_path: Path
) -> None:
    world = fresh_world("horovod", 2)
    results = world.call(training.alone_for_a_while, str(tmp_path / "again"))
    for said in results:
        assert "its optimizer is a plain Adam" in said["after local"]
        assert "its optimizer is a plain Adam" in said["before init"]
    assert results[0]["together"] == results[1]["together"]
    assert results[0]["alone"] != results[1]["alone"]
