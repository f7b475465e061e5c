"""Asynchronous parameter servers, in real processes: nothing is lost, nothing is staler than allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.strategies import async_chief as chief
from tests.strategies.async_worlds import AsyncWorld
from tests.worlds import ROOT, thorough


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[AsyncWorld]:
    """Where an update waits for the one before: then all is as in one process."""
    world = AsyncWorld(workers=1, servers=2, options="max_staleness=0")
    yield world
    assert world.close().codes == [0]


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [
        ("dense", "clipped"),
        ("dense", "scheduled"),
        ("dense", "scaled"),
        ("normalized", "adam"),
        ("regularized", "sgd"),
        ("embedding", "sgd"),
        *[
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (("dense", "sgd"), ("dense", "accumulated"))
        ],
    ],
)
def test_one_at_a_time_equals_one_process(one_at_a_time: AsyncWorld, network: str, optimizer: str) -> None:
    differs = one_at_a_time.call(chief.difference_from_one_process, network, optimizer)
    assert differs.pop("staleness") == 0
    assert max(differs.values()) < 1e-5, differs


def test_rows_of_a_table_stay_rows(one_at_a_time: AsyncWorld) -> None:
    found = one_at_a_time.call(chief.sparse_rows)
    assert found == {
        "sparse": [True, False, False],
        "only used rows": True,
        "all used rows": True,
        "iterations": 40,
    }


@pytest.fixture(scope="module")
def racing() -> Iterator[AsyncWorld]:
    """Two workers, whose steps overtake one another."""
    world = AsyncWorld(workers=2, options="max_staleness=2")
    yield world
    ended = world.close()
    assert ended.codes == [0], ended.output
    assert not ended.orphans


def test_who_is_who(racing: AsyncWorld) -> None:
    assert racing.call(chief.world) == {"rank": 0, "size": 4, "replicas": 2, "backend": "single", "sum": 2.0}


def test_counts_are_exact_and_staleness_is_bounded(racing: AsyncWorld) -> None:
    epochs = 4
    found = racing.call(chief.exact_counts, epochs)
    assert found["iterations"] == epochs * chief.STEPS
    assert found["slot updates"] == [float(epochs * chief.STEPS)]
    assert found["samples"] == [chief.ROWS] * epochs
    assert found["batch logs"] == epochs * chief.STEPS
    assert found["samples grow"]
    assert 0 < max(found["staleness"]) <= 2
    assert found["loss"][-1] < found["loss"][0]


@pytest.mark.parametrize(
    "kind",
    ["shard of arrays", "shard of a dataset", "arrays", "repeated dataset", "dataset of unknown length"],
)
def test_each_epoch_uses_each_row_once(racing: AsyncWorld, kind: str) -> None:
    assert racing.call(chief.rows_seen, kind) == [[1, 203]] * 2


def test_mixed_precision(racing: AsyncWorld) -> None:
    found = racing.call(chief.mixed_precision)
    assert found["optimizer"] == "LossScaleOptimizer"
    assert 3 * chief.STEPS - 4 <= found["iterations"] <= 3 * chief.STEPS
    assert found["accuracy"][-1] > 0.85, found


def test_callbacks_and_files(racing: AsyncWorld) -> None:
    found = racing.call(chief.callbacks)
    steps = found["epochs"] * chief.STEPS
    assert found["epochs"] == 4
    assert found["iterations"] == found["loaded iterations"] == steps
    assert found["trained again"] == steps + chief.STEPS
    assert found["rates"] == [0.01, 0.005, 0.00333, 0.0025]
    assert found["loaded optimizer"] == "Adam"
    assert found["accuracy"] > 0.9
    assert {"epoch", "loss", "staleness", "val_loss"} <= set(found["csv"])
    for name in ("loaded weights", "loaded slots", "evaluate", "predict", "tfdist.predict"):
        assert found[name] < 1e-6, (name, found)


def test_stop_within_an_epoch_makes_no_further_update(racing: AsyncWorld) -> None:
    assert racing.call(chief.stop_within_an_epoch) == {
        "stopped": 7,
        "single": 8,
        "fit again": 8 + chief.STEPS,
        "logs": ["accuracy", "loss"],
    }


def test_resumes_from_a_backup(racing: AsyncWorld, tmp_path: Path) -> None:
    failed = racing.call(chief.resume, str(tmp_path), 2)
    assert failed["iterations"] == 2 * chief.STEPS
    assert failed["files"]
    resumed = racing.call(chief.resume, str(tmp_path), None)
    assert resumed["epochs"] == [2, 3]
    assert resumed["iterations"] == 4 * chief.STEPS


def test_own_train_step(racing: AsyncWorld) -> None:
    found = racing.call(chief.own_train_step)
    assert found["logs"] == ["loss", "own", "staleness"]
    assert found["steps"] == found["iterations"] == 2 * chief.STEPS
    assert found["own"][-1] < 1.0


def test_wrong_use_is_refused(racing: AsyncWorld) -> None:
    said = racing.call(chief.refusals)
    for name, part in {
        "optimizer outside": "made in tfdist.scope(); received an optimizer made outside",
        "model outside": "was made outside. Write `with tfdist.scope():`",
        "passes": "backward_passes_per_step=2 is for strategies in which ranks combine",
        "compression": "compression is for strategies",
        "sum": "op=ReduceOp.SUM is for strategies",
        "predivide": "gradient_predivide_factor=2.0 is for strategies",
        "process set": "process_set is for strategies",
        "plain optimizer": "tfdist.DistributedOptimizer(SGD(...)) in tfdist.scope()",
        "fit inside": "End the `with tfdist.scope():` block",
        "eager": "received run_eagerly=True",
        "metric": 'tfdist_state = "sum"',
        "error in the step": "InvalidArgumentError",
    }.items():
        assert part in said[name], (name, said[name])
    assert said["trains afterwards"] == ""


def test_servers_are_reached_from_this_host_only(racing: AsyncWorld) -> None:
    assert racing.call(chief.addresses) == {"loopback": True, "others": False}


@pytest.mark.parametrize("lost", ["worker", "server"])
def test_losses(lost: str, tmp_path: Path) -> None:
    """A lost worker costs its batch a second time, and no count; a lost server ends all, and says how to go on."""
    world = AsyncWorld(workers=2)
    if lost == "worker":
        world.begin(chief.exact_counts, 12, chief.ROWS, str(tmp_path))
        world.job.wait_until((tmp_path / "trains").exists)
        world.process(3).kill()
        found = world.finish()
        assert found["iterations"] == 12 * chief.STEPS
        assert found["slot updates"] == [float(12 * chief.STEPS)]
        assert found["samples"] == [chief.ROWS] * 12
        ended = world.close()
        assert ended.codes == [0], ended.output
        assert "training goes on with 1 of 2 workers" in ended.output
        return
    world.begin(chief.wait_at_a_batch, str(tmp_path))
    world.job.wait_until((tmp_path / "trains").exists)
    world.process(1).kill()
    began = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"PeerLostError: Rank 1 .*BackupAndRestore.*resumes from the last"
    ):
        world.finish()
    assert time.monotonic() - began < 15.0
    ended = world.close()
    assert ended.codes == [128 + 9]
    assert not ended.orphans


@pytest.mark.parametrize("steps", thorough(2000))
def test_counts_of_a_long_race(steps: int) -> None:
    """The stress test: four workers, thousands of steps."""
    world = AsyncWorld(workers=4)
    try:
        epochs = steps // 500
        found = world.call(chief.exact_counts, epochs, 500 * chief.BATCH, timeout=600.0)
    finally:
        ended = world.close()
    assert ended.codes == [0]
    assert found["iterations"] == steps
    assert found["slot updates"] == [float(steps)]
    assert found["samples"] == [500 * chief.BATCH] * epochs


def test_horovod_is_refused() -> None:
    code = (
        "import tfdist\ntry: tfdist.init(backend='horovod')\n"
        "except tfdist.BackendUnavailableError as error: print(error)\n"
    )
    place = {"TFDIST_RANK": "0", "TFDIST_SIZE": "3", "TFDIST_STRATEGY": "async_parameter_server"}
    place |= {
        "TFDIST_LOCAL_RANK": "0",
        "TFDIST_LOCAL_SIZE": "3",
        "TFDIST_CROSS_RANK": "0",
        "TFDIST_CROSS_SIZE": "1",
    }
    place |= {"TFDIST_JOB": "a", "TFDIST_RENDEZVOUS": "file:///nowhere"}
    said = _python(code, **place)
    assert "runs on TensorFlow's own engine; received backend='horovod'" in said, said


def test_alone_the_script_just_trains() -> None:
    code = (
        "import json, keras, numpy as np, tfdist\n"
        "tfdist.init(strategy='async_parameter_server(servers=2)')\n"
        "with tfdist.scope():\n"
        "    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "    model.compile(tfdist.DistributedOptimizer('sgd'), 'mse')\n"
        "model.fit(tfdist.shard((np.ones((8, 2)), np.ones((8, 1))), batch_size=4), verbose=0)\n"
        "print(json.dumps([int(model.optimizer.iterations), tfdist.size(), tfdist.replicas()]))\n"
    )
    assert json.loads(_python(code).splitlines()[-1]) == [2, 1, 1]


def _python(code: str, **variables: str) -> str:
    done: Any = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return str(done.stdout or done.stderr)
