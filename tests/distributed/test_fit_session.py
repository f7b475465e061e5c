"""One `fit()` of all ranks: unequal data, early ends and failures, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.distributed import fitting
from tests.worlds import World, in_one_process, on

PAIRS = on(("tf", 2), ("horovod", 2))
# What no engine has a part in runs on one of them.
TF, HOROVOD = on(("tf", 2)), on(("horovod", 2))


@functools.cache
def alone(function: Any, *args: Any, options: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    result: dict[str, Any] = in_one_process(function, *args, dict(options))
    return result


def assert_equal_training(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    assert [result["iterations"] for result in results] == [expected["iterations"]] * len(results)
    assert max(results[0]["moved"]) > 1e-4
    for key in ("weights", "slots"):
        for actual, wanted in zip(results[0][key], expected[key], strict=True):
            np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)


def assert_equal_history(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert set(result["history"]) == set(expected["history"])
        for name, values in expected["history"].items():
            np.testing.assert_allclose(result["history"][name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@PAIRS
@pytest.mark.parametrize(
    ("plan", "length"),
    [("fewer batches", True), ("fewer batches", False), ("smaller batches", True), ("no data", False)],
)
def test_unequal_data(world: World, plan: str, length: bool) -> None:
    expected = alone(fitting.uneven, plan, world.size, True)
    results = world.call(fitting.uneven, plan, world.size, length, {})
    assert_equal_training(results, expected)
    assert_equal_history(results, expected)


@on(("tf", 4), ("horovod", 4))
@pytest.mark.parametrize("length", [True, False], ids=["known length", "unknown length"])
def test_every_rank_has_other_data(world: World, length: bool) -> None:
    expected = alone(fitting.uneven, "ragged", world.size, True)
    results = world.call(fitting.uneven, "ragged", world.size, length, {})
    assert_equal_training(results, expected)
    assert_equal_history(results, expected)


@TF
@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 2}, {"run_eagerly": True}, {"jit_compile": True}], ids=str
)
def test_unequal_data_in_every_mode(world: World, options: dict[str, Any]) -> None:
    expected = alone(fitting.uneven, "ragged", world.size, True)
    results = world.call(fitting.uneven, "ragged", world.size, False, options)
    assert_equal_training(results, expected)
    assert_equal_history(results, expected)


@HOROVOD
@pytest.mark.parametrize("length", [True, False], ids=["known length", "unknown length"])
def test_more_steps_per_epoch_than_data(world: World, length: bool) -> None:
    options = {"steps_per_epoch": 7}
    expected = alone(fitting.uneven, "fewer batches", world.size, True, options=tuple(options.items()))
    results = world.call(fitting.uneven, "fewer batches", world.size, length, options)
    assert_equal_training(results, expected)
    assert_equal_history(results, expected)


@TF
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=str)
@pytest.mark.parametrize("when", ["batch", "last batch", "epoch"])
def test_one_rank_stops_all(world: World, when: str, options: dict[str, Any]) -> None:
    if when == "last batch" and options:
        pytest.skip("an execution of two has no fifth batch alone")
    expected = alone(fitting.stopping, when, options=tuple(options.items()))
    results = world.call(fitting.stopping, when, options)
    assert_equal_training(results, expected)
    assert {result["epochs"] for result in results} == {expected["epochs"]} == {2}
    assert all(result["stopped"] for result in results)


@PAIRS
def test_failure_of_one_rank_is_told_to_all_and_they_train_again(world: World) -> None:
    *others, failed = world.call(fitting.failing, {})
    for place in fitting.FAILURES:
        kind, message = failed[place]
        assert (
            "unreadable sample" in message
            if place == "data"
            else (kind, message) == ("ValueError", f"raised in {place}")
        )
        for said in others:
            kind, message = said[place]
            assert kind == "PeerFailedError", (place, kind, message)
            assert f"rank {world.size - 1} with" in message
            assert ("unreadable sample" if place == "data" else f"ValueError: raised in {place}") in message
            assert said[f"{place}, then"] == failed[f"{place}, then"]


@pytest.mark.parametrize("backend", ["tf", "horovod"])
def test_failure_in_the_middle_of_a_step_is_told_at_once(
    fresh_world: Callable[..., World], backend: str
) -> None:
    world = fresh_world(backend, 2)
    (kind, message, seconds), (own_kind, own_message, _) = world.call(fitting.failing_midway)
    assert "out of memory" in own_message, own_kind
    assert kind == "PeerLostError", message
    assert message.startswith("Rank 1")
    assert "left fit() with InvalidArgumentError: ValueError: out of memory" in message
    assert seconds < 30.0, "it waited for the timeout of 60 s"


@PAIRS
def test_layer_frozen_on_one_rank(world: World) -> None:
    for said in world.call(fitting.frozen_on_one_rank):
        assert said.startswith("CollectiveMismatchError"), said
        first, second = said.split("rank 1 has")
        assert "rank 0 has sequential/dense/kernel float32[6, 8]" in first
        assert "float32[6, 8]" not in second


@TF
def test_ranks_must_agree_on_epochs(world: World) -> None:
    for said in world.call(fitting.disagreeing):
        assert said.startswith("OutOfSyncError"), said
        assert "same epochs; received 1 on rank 0, 2 on rank 1" in said


@HOROVOD
@pytest.mark.parametrize("kind", ["EarlyStopping", "ReduceLROnPlateau"])
def test_stock_callbacks_decide_as_in_one_process(world: World, kind: str) -> None:
    expected = in_one_process(fitting.deciding, kind)
    results = world.call(fitting.deciding, kind)
    assert_equal_training(results, expected)
    assert_equal_history(results, expected)
    if kind == "EarlyStopping":
        assert len(expected["history"]["loss"]) < 8, "it decided something"
    else:
        assert len(set(expected["history"]["learning_rate"])) > 1, "it decided something"


@HOROVOD
def test_nan_on_one_rank_ends_training_on_all(world: World) -> None:
    results = world.call(fitting.deciding, "TerminateOnNaN")
    assert {len(result["history"]["loss"]) for result in results} == {1}
    assert {result["iterations"] for result in results} == {3}, "the step with the NaN was the last"


@TF
@pytest.mark.parametrize("kind", ["weights", "rate"])
def test_unequal_start_is_refused_before_the_first_step(world: World, kind: str) -> None:
    for said in world.call(fitting.unequal_start, kind):
        assert "must start from the same weights" in said, said
        assert ("learning_rate" if kind == "rate" else "kernel") in said
        assert "on rank 1" in said
        assert "BroadcastGlobalVariablesCallback(0)" in said
