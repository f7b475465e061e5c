"""One script under every launcher: the same world, and the same training."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.distributed.jobs import SCRIPTS, Ahead, Ended, records_in, run_ahead, start, tfdist_run
from tests.source_tree import search_path

PYTHON = [sys.executable, str(SCRIPTS / "train.py")]
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe", "--allow-run-as-root"]
HOROVODRUN = ["horovodrun", "--gloo", "-np", "2"]  # without --gloo it passes options that Open MPI 5 rejects
SEED = "5"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}

# Launcher and engine that the script must see.
CASES = {
    "alone": ("none", "single"),
    "tfdist run, tf": ("tfdist", "tf"),
    "tfdist run, horovod": ("tfdist", "horovod"),
    "horovodrun, tf": ("horovodrun", "tf"),
    "horovodrun, horovod": ("horovodrun", "horovod"),
    "mpirun twice, tf": ("openmpi", "tf"),
    "mpirun, auto": ("openmpi", "horovod"),
    "TF_CONFIG": ("tf_config", "tf"),
    "srun": ("slurm", "tf"),
}
# What the ranks say of a process set given to init, and of one added after training.
EACH_SET = [["1: 7.0"], ["2: 7.0"]]
SETS = ["tfdist run, horovod", "horovodrun, horovod", "horovodrun, tf", "mpirun, auto"]
IN_TWO = [case for case in CASES if case != "alone"]


def run(case: str, folder: Path) -> Ended:
    backend = CASES[case][1]
    inherited = folder / "on the path"
    inherited.mkdir(exist_ok=True)
    (inherited / "module_on_the_path.py").write_text("TEXT = 'found'\n")
    common = {
        "PYTHONPATH": search_path(inherited),
        "TMPDIR": str(folder),
        "TFDIST_TIMEOUT": "90",
    } | ({"TESTED_SETS": "1"} if case in SETS else {})
    chosen = {} if backend == "single" else {"TFDIST_BACKEND": backend}
    script = [*PYTHON, SEED]
    match case:
        case "alone":
            return start(script, **common).result()
        case "tfdist run, tf" | "tfdist run, horovod":
            command = tfdist_run("train.py", SEED, options=["--backend", backend])
            return start(command, **common).result()
        case "horovodrun, tf" | "horovodrun, horovod":
            return start([*HOROVODRUN, *script], **common, **chosen).result()
        case "mpirun twice, tf":  # neither knows of the other
            other = [*MPIRUN, *PYTHON, "6"]
            return start([*MPIRUN, *script], other, **common, **chosen).result()
        case "mpirun, auto":
            return start([*MPIRUN, *script], **common).result()
        case "TF_CONFIG":
            cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
            each = [
                {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
                for index in range(2)
            ]
            return start(script, script, each=each, **common, **chosen).result()
        case "srun":
            each = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
            return start(script, script, each=each, **common, **chosen, **SLURM).result()
    raise AssertionError(case)


def free_ports(count: int) -> list[int]:
    """Ports that nothing used a moment ago: TF_CONFIG can't do without fixed ones."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead[Ended]]:
    def make(case: str) -> Ended:
        return run(case, tmp_path_factory.mktemp("launcher"))

    yield from run_ahead(request, "case", make)


@pytest.mark.parametrize("case", CASES)
def test_same_script_sees_its_world(case: str, ended: Ahead[Ended]) -> None:
    launcher, backend = CASES[case]
    require(backend)
    job = ended[case]
    assert set(job.codes) == {0}, job.output[-4000:]
    assert not job.orphans
    records = records_in(job.output)
    size = 1 if case == "alone" else 2
    jobs = 2 if "twice" in case else 1
    assert [record["rank"] for record in records] == sorted([*range(size)] * jobs), job.output[-4000:]
    for record in records:
        rank = record["rank"]
        assert record["size"] == size
        assert record["local"] == [rank, size]
        assert record["cross"] == [0, 1]
        assert (record["launcher"], record["backend"]) == (launcher, backend)
        assert record["mpi"] == (case == "mpirun, auto")
        assert record["steps"] == 2 * 64 // (8 * size)
        assert record["inherited"] == "found"
        assert record["prefix"] == sys.prefix
        assert record["folder"] == os.getcwd()


@pytest.mark.parametrize("case", IN_TWO)
def test_ranks_end_equal(case: str, ended: Ahead[Ended]) -> None:
    require(CASES[case][1])
    job = ended[case]
    for output in job.outputs if "twice" in case else [job.output]:
        records = records_in(output)
        assert len(records) == 2
        for what in ("fingerprint", "weights", "loss", "job"):
            assert records[0][what] == records[1][what]


@pytest.mark.parametrize("case", SETS)
def test_process_sets(case: str, ended: Ahead[Ended]) -> None:
    require(CASES[case][1])
    said = [record["sets"] for record in records_in(ended[case].output)]
    if case == "mpirun, auto":  # MPI can't start again
        assert all('process_sets="dynamic"' in each[0] for each in said), said
    else:
        assert said == EACH_SET


@pytest.mark.parametrize("case", IN_TWO[1:])
def test_training_does_not_depend_on_the_launcher(case: str, ended: Ahead[Ended]) -> None:
    require(CASES[case][1])
    first, other = records_in(ended[IN_TWO[0]].outputs[0])[0], records_in(ended[case].outputs[0])[0]
    assert other["weights"] == pytest.approx(first["weights"], abs=1e-3)
    assert other["loss"] == pytest.approx(first["loss"], abs=1e-4)


def test_two_jobs_at_a_time_stay_apart(ended: Ahead[Ended]) -> None:
    first, second = map(records_in, ended["mpirun twice, tf"].outputs)
    assert first[0]["job"] != second[0]["job"]
    assert first[0]["weights"] != second[0]["weights"]
