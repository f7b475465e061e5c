"""A pipeline ends where the model without one ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.pipeline import training
from tests.worlds import World


@pytest.fixture(scope="module")
def process() -> Iterator[World]:
    """One process, whose CPU is three devices."""
    world = World("single", 1)
    assert world.call(training.divide_cpu) == [3]
    yield world
    world.close()


def assert_equal(actual: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_same_training(result: Any, tolerance: float = 1e-6) -> None:
    before, wanted, actual = result
    assert max(np.abs(a - b).max() for a, b in zip(before, wanted["weights"], strict=True)) > 1e-3
    assert_equal(actual["weights"], wanted["weights"], tolerance)
    assert_equal(actual["slots"], wanted["slots"], tolerance)
    assert_equal(actual["predict"], wanted["predict"], 10 * tolerance)
    for kind in ("history", "evaluate"):
        assert actual[kind].keys() == wanted[kind].keys()
        for name in wanted[kind]:
            np.testing.assert_allclose(
                actual[kind][name], wanted[kind][name], rtol=10 * tolerance, atol=10 * tolerance
            )


@pytest.mark.parametrize("optimizer", sorted(training.OPTIMIZERS))
def test_optimizers(process: World, optimizer: str) -> None:
    assert_same_training(process.call(training.compare, training.regular, {"optimizer": optimizer})[0])


@pytest.mark.parametrize("options", [{"weighted": True}, {"run_eagerly": True}, {"steps_per_execution": 2}])
def test_options(process: World, options: dict[str, Any]) -> None:
    assert_same_training(process.call(training.compare, training.regular, options)[0])


def test_naive(process: World) -> None:
    assert_same_training(process.call(training.compare, training.chain, {}, 1, "naive")[0])


@pytest.mark.parametrize("make", [training.chain, training.embedded])
def test_models(process: World, make: Any) -> None:
    assert_same_training(process.call(training.compare, make, {})[0])


def test_mixed_precision(process: World) -> None:
    assert_same_training(process.call(training.compare_mixed_precision)[0], 2e-3)


def test_random_layers_and_batch_normalization_act_on_micro_batches(process: World) -> None:
    wanted, actual = process.call(training.random_layers)[0]
    assert_equal(actual, wanted)


def test_fewer_rows_than_micro_batches(process: World) -> None:
    wanted, actual = process.call(training.fewer_rows_than_micro_batches)[0]
    assert_equal(actual, wanted)


def test_everything_is_on_the_device_of_its_stage(process: World) -> None:
    (found,) = process.call(training.placement)
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    assert found["variables"] == [each for each in devices for _ in range(2)]
    assert sorted(found["slots"]) == [each for each in devices for _ in range(4)]
    # Each of two micro-batches: forward, again, and the gradients of weights and inputs (of the first stage, too).
    assert found["products"].keys() == set(devices)
    assert min(found["products"].values()) >= 2 * 3


def test_files_are_those_of_the_model(process: World) -> None:
    (result,) = process.call(training.saved_and_loaded)
    assert result["class"] == "Functional"
    assert result["names"]
    for saved in result["saved"][1:]:
        assert_equal(saved, result["saved"][0], 0)
    for after in result["after"][1:]:
        assert_equal(after, result["after"][0])
    assert result["iterations"] == [6, 6, 6]


def test_refusals(process: World) -> None:
    (messages,) = process.call(training.refusals)
    wanted = [
        "ValueError: Stages in one process run by the schedules 'gpipe', 'naive'; received '1f1b'",
        "ValueError: The naive schedule has no micro-batches; received micro_batches=2",
        "ValueError: Each stage has a device of its own; received stages=9 on a process with 3",
        "ValueError: `devices` names the device of each stage, 2 of /device:CPU:0",
        "ValueError: Pipeline cuts Functional and built Sequential models; received Subclassed",
        "ValueError: Pipeline cuts Functional and built Sequential models; received Sequential",
        "TypeError: Pipeline takes a keras.Model or a list of layers; received 3",
        "ValueError: XLA compiles for one device",
        "ValueError: A schedule needs at least one stage and one micro-batch; received stages=0",
        "ValueError: A schedule needs at least one stage and one micro-batch; received stages=2, micro_batches=0",
    ]
    for message, start in zip(messages, wanted, strict=True):
        assert message.startswith(start)


def test_a_stage_computes_again_one_micro_batch_after_another(process: World) -> None:
    (found,) = process.call(training.order_of_replays)
    assert found == {device: [True] * 3 for device in ("CPU:0", "CPU:1", "CPU:2")}
