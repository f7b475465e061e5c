"""`mirrored`, `central_storage` and `multi_worker_mirrored`: equal to one process of plain Keras, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.equivalence import OPTIMIZERS, available
from tests.strategies import placed_ranks
from tests.worlds import World, thorough

CASES: dict[str, dict[str, Any]] = {
    "schedule, global clipping, ragged": {
        "optimizer": "Adam", "config": {"global_clipnorm": 0.1}, "schedule": 0.05, "rows": 59,
    },
    "rows of a large table, averaged weights, decay": {
        "kind": "embedding", "optimizer": "AdamW", "epochs": 1,
        "config": {"learning_rate": 0.01, "use_ema": True, "ema_overwrite_frequency": 3},
    },
    "attention, loss scaled outside, callbacks": {
        "kind": "transformer", "optimizer": "Adam", "scaled": "outside", "callbacks": True,
    },
    "passes, momentum, clipping": {
        "optimizer": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9, "clipnorm": 0.1}, "passes": 2,
    },
    "passes, of which the last window holds half": {
        "optimizer": "Adam", "config": {"learning_rate": 0.01, "use_ema": True}, "passes": 2, "rows": 40,
    },
    "Keras's accumulation, steps per execution, a dataset": {
        "optimizer": "Adam", "config": {"gradient_accumulation_steps": 2},
        "compile": {"steps_per_execution": 3}, "dataset": True,
    },
    "loss scaled inside, Keras's own batches": {
        "optimizer": "SGD", "config": {"clipvalue": 0.01}, "scaled": "inside", "rows": 50, "raw": True,
    },
}  # fmt: skip


def assert_equal(results: list[dict[str, Any]]) -> None:
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    result = results[0]
    ours, theirs = result.get("iterations", (1, 1))
    assert ours == theirs > 0
    assert result["moved"] > 1e-4, "weights did not move"
    for what in set(result) - {"iterations", "moved", "digest"}:
        assert result[what] <= 1e-5, f"{what} differ by {result[what]}"


@pytest.fixture(scope="module")
def four_devices() -> Any:
    """One process whose CPU is four logical devices."""
    world = World("single", 1, strategy="mirrored(devices=4)")
    yield world
    world.close()


@pytest.fixture(scope="module")
def workers() -> Any:
    """Two processes with two logical devices each."""
    world = World("tf", 2, strategy="multi_worker_mirrored(devices=2)")
    yield world
    world.close()


@pytest.mark.parametrize("case", CASES)
def test_mirrored_equals_one_process(four_devices: World, case: str) -> None:
    assert_equal(four_devices.call(placed_ranks.differences, "mirrored(devices=2)", CASES[case]))


# The update is the same code; what differs is where variables are, and who reads them.
@pytest.mark.parametrize("case", [*list(CASES)[:2], *thorough(*list(CASES)[2:])])
def test_central_storage_equals_one_process(four_devices: World, case: str) -> None:
    assert_equal(four_devices.call(placed_ranks.differences, "central_storage(devices=2)", CASES[case]))


@pytest.mark.parametrize("case", [next(iter(CASES)), *thorough(*list(CASES)[1:])])
@pytest.mark.parametrize(
    "strategy", ["mirrored(devices=4)", *thorough("central_storage(devices=4)", "mirrored(devices=1)")]
)
def test_other_numbers_of_devices(four_devices: World, strategy: str, case: str) -> None:
    assert_equal(four_devices.call(placed_ranks.differences, strategy, CASES[case]))


@pytest.mark.parametrize("name", thorough(*OPTIMIZERS))
@pytest.mark.parametrize("strategy", ["mirrored(devices=2)", "central_storage(devices=2)"])
def test_every_optimizer_equals_one_process(four_devices: World, strategy: str, name: str) -> None:
    if not available(name):
        pytest.skip(f"this Keras has no {name}")
    case = {"optimizer": name, "config": OPTIMIZERS[name], "epochs": 1}
    assert_equal(four_devices.call(placed_ranks.differences, strategy, case))


@pytest.mark.parametrize("strategy", ["mirrored(devices=2)", "central_storage(devices=4)"])
def test_normalization_on_devices(four_devices: World, strategy: str) -> None:
    assert_equal(four_devices.call(placed_ranks.normalized, strategy))
    assert_equal(four_devices.call(placed_ranks.normalized_together, strategy))


@pytest.mark.parametrize("strategy", ["mirrored(devices=2)", "central_storage(devices=2)"])
def test_replicas_drop_different_units(four_devices: World, strategy: str) -> None:
    ((masks, replicas),) = four_devices.call(placed_ranks.dropped, strategy)
    assert masks == replicas == 2


@pytest.mark.parametrize("strategy", ["mirrored(devices=2)", "central_storage(devices=2)"])
def test_files_of_devices_are_plain(four_devices: World, strategy: str, tmp_path: Path) -> None:
    assert_saved(four_devices.call(placed_ranks.saved, strategy, str(tmp_path)))


def assert_saved(results: list[dict[str, Any]]) -> None:
    assert len({result["digest"] for result in results}) == 1, "ranks differ"
    for result in results:
        assert result["epochs"] == 2, "EarlyStopping decides by the logs of all"
        assert result["lines"] == 3, "a header and a line for each epoch"
        assert result["plain"] == "Adam"
        assert result["iterations"] == (8, 12) or result["iterations"] == (8, 8 + 4)
        assert result["weights"] == result["slots"] == 0.0
        assert result["resumed"] <= 1e-7


@pytest.mark.parametrize("strategy", ["mirrored(devices=2)", "central_storage(devices=2)"])
def test_wrong_use_is_refused(four_devices: World, strategy: str) -> None:
    (said,) = four_devices.call(placed_ranks.refused, strategy)
    assert "with tfdist.scope()" in said["outside"]
    assert "optimizer 'sgd" in said["optimizer_outside"]
    assert "plain SGD" in said["plain"]
    assert "jit_compile=True" in said["compiled"]
    assert "compression" in said["compressed"]
    assert "DistributedOptimizer" in said["taped"]
    assert said["alone"] == "nothing"


@pytest.mark.parametrize("case", [*list(CASES)[:2], *thorough(*list(CASES)[2:])])
def test_workers_equal_one_process(workers: World, case: str) -> None:
    assert_equal(workers.call(placed_ranks.differences, None, CASES[case]))


def test_normalization_on_workers(workers: World) -> None:
    assert_equal(workers.call(placed_ranks.normalized, None))
    assert_equal(workers.call(placed_ranks.normalized_together, None))


def test_files_of_workers_are_plain(workers: World, tmp_path: Path) -> None:
    assert_saved(workers.call(placed_ranks.saved, None, str(tmp_path)))


@pytest.mark.parametrize("call", ["evaluate", *thorough("predict")])
def test_a_lone_call_is_an_error(fresh_world: Callable[..., World], call: str) -> None:
    world = fresh_world("tf", 2, timeout=5.0, strategy="multi_worker_mirrored")
    said = world.call(placed_ranks.lone, call)[0]
    assert said.startswith("CollectiveTimeoutError")
    assert "rank 1 did not arrive" in said


def test_a_worker_that_fails_is_named(fresh_world: Callable[..., World]) -> None:
    world = fresh_world("tf", 2, timeout=20.0, strategy="multi_worker_mirrored")
    first, last = world.call(placed_ranks.failing)
    assert last == "ValueError: a callback failed"
    assert first.startswith("PeerLostError: Rank 1")
    assert "a callback failed" in first
