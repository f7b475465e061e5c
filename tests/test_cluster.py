"""Environments as launchers really set them, and every way in which they can contradict themselves."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tfdist.cluster import ClusterSpec, from_environment, with_hosts
from tfdist.errors import LauncherError

# Captured from Open MPI 5.0.11, `mpirun -np 2 --oversubscribe`; of its 40 variables those that matter.
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_num_procs": "2",
    "PMIX_NAMESPACE": "prterun-vm-7357@1",
    "PMIX_RANK": "1",
}
# Captured from MPICH 4.0.2, `mpiexec.hydra -np 2`: no variable names the job.
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
# Captured from Horovod 0.28.1, `horovodrun --gloo -np 2`.
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "36516",
    "HOROVOD_HOSTNAME": "localhost",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}
TFDIST = {
    "TFDIST_RANK": "1",
    "TFDIST_SIZE": "2",
    "TFDIST_LOCAL_RANK": "1",
    "TFDIST_LOCAL_SIZE": "2",
    "TFDIST_CROSS_RANK": "0",
    "TFDIST_CROSS_SIZE": "1",
    "TFDIST_JOB": "run-1",
    "TFDIST_RENDEZVOUS": "file:///tmp/run-1/rendezvous",
}


def tf_config(task: dict[str, Any], **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def place(spec: ClusterSpec) -> tuple[int, ...]:
    return (spec.rank, spec.size, spec.local_rank, spec.local_size, spec.cross_rank, spec.cross_size)


@pytest.mark.parametrize(
    ("environ", "launcher", "expected", "job"),
    [
        ({}, "none", (0, 1, 0, 1, 0, 1), ""),
        (TFDIST, "tfdist", (1, 2, 1, 2, 0, 1), "run-1"),
        (HOROVODRUN, "horovodrun", (1, 2, 1, 2, 0, 1), "horovodrun-127.0.0.1-36516"),
        (OPEN_MPI_5, "openmpi", (1, 2, 1, 2, 0, 1), "openmpi-prterun-vm-7357@1"),
        (HYDRA | {"TFDIST_JOB": "run-7"}, "mpich", (1, 2, 1, 2, 0, 1), "run-7"),
        (SLURM_STEP, "slurm", (4, 5, 0, 1, 2, 3), "slurm-812.3"),
        # `srun --mpi=pmi2` sets both; only Slurm knows hosts and job.
        (
            SLURM_STEP | {"PMI_RANK": "4", "PMI_SIZE": "5", "PMI_FD": "9"},
            "slurm",
            (4, 5, 0, 1, 2, 3),
            "slurm-812.3",
        ),
        # An allocation, a batch script and an interactive shell are not parallel programs.
        ({"SLURM_JOB_ID": "812", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "none", (0, 1, 0, 1, 0, 1), ""),
        (SLURM_STEP | {"SLURM_STEP_ID": "4294967291"}, "none", (0, 1, 0, 1, 0, 1), ""),
        (SLURM_STEP | {"SLURM_STEP_ID": "4294967290"}, "none", (0, 1, 0, 1, 0, 1), ""),
        # Daemons of Open MPI and Hydra, and tfdist's launcher, may themselves be tasks of a Slurm step.
        (OPEN_MPI_5 | SLURM_STEP, "openmpi", (1, 2, 1, 2, 0, 1), "openmpi-prterun-vm-7357@1"),
        (HYDRA | SLURM_STEP, "mpich", (1, 2, 1, 2, 0, 1), "mpich-slurm-812.3"),
        (TFDIST | SLURM_STEP, "tfdist", (1, 2, 1, 2, 0, 1), "run-1"),
        # Cloud services set a TF_CONFIG of one worker on single machines.
        (
            TFDIST | tf_config({"type": "chief", "index": 0}, chief=["a:1"]),
            "tfdist",
            (1, 2, 1, 2, 0, 1),
            "run-1",
        ),
        ({"TF_CONFIG": "{}"}, "tf_config", (0, 1, 0, 1, 0, 1), ""),
        # Launchers that agree.
        (TFDIST | HOROVODRUN, "tfdist", (1, 2, 1, 2, 0, 1), "run-1"),
    ],
)
def test_environment_gives_place(
    environ: dict[str, str], launcher: str, expected: tuple[int, ...], job: str
) -> None:
    spec = from_environment(environ)
    assert (spec.launcher, place(spec), spec.job) == (launcher, expected, job)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"TFDIST_RANK": "0"}, ["TFDIST_RANK=0", "TFDIST_SIZE"]),
        (TFDIST | {"TFDIST_RANK": "2"}, ["rank 2", "size 2", "TFDIST_RANK=2"]),
        (TFDIST | {"TFDIST_LOCAL_SIZE": "3"}, ["local size 3", "TFDIST_LOCAL_SIZE=3"]),
        (TFDIST | {"TFDIST_LOCAL_RANK": "2"}, ["local rank 2", "TFDIST_LOCAL_RANK=2"]),
        (TFDIST | {"TFDIST_SIZE": "0"}, ["TFDIST_SIZE=0"]),
        (TFDIST | {"TFDIST_SIZE": "two"}, ["TFDIST_SIZE=two", "whole number"]),
        (TFDIST | {"TFDIST_RANK": "-1"}, ["TFDIST_RANK=-1"]),
        (TFDIST | {"TFDIST_CROSS_RANK": "1"}, ["host number 1"]),
        (TFDIST | {"TFDIST_CROSS_SIZE": ""}, ["TFDIST_CROSS_RANK=0", "TFDIST_CROSS_SIZE not set"]),
        (TFDIST | {"TFDIST_JOB": "", "TFDIST_RENDEZVOUS": ""}, ["TFDIST_JOB", "TFDIST_SIZE=2"]),
        (TFDIST | {"TFDIST_RENDEZVOUS": "/tmp/x"}, ["TFDIST_RENDEZVOUS", "'/tmp/x'", "file:///"]),
        ({"HOROVOD_SIZE": "2"}, ["HOROVOD_SIZE=2", "HOROVOD_RANK"]),
        (HOROVODRUN | {"HOROVOD_ELASTIC": "1"}, ["HOROVOD_ELASTIC=1", "--min-np"]),
        (HOROVODRUN | {"HOROVOD_GLOO_RENDEZVOUS_PORT": ""}, ["TFDIST_JOB", "horovodrun"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_SIZE=2", "MPI_LOCALRANKID"]),
        (HYDRA, ["TFDIST_JOB", "mpich"]),
        (OPEN_MPI_5 | TFDIST | {"TFDIST_RANK": "0"}, ["disagree", "TFDIST_RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
        (SLURM_STEP | {"PMI_RANK": "0", "PMI_SIZE": "5"}, ["disagree", "PMI_RANK=0", "SLURM_PROCID=4"]),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2"}, ["SLURM_STEP_TASKS_PER_NODE=2", "add up"]),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, ["SLURM_STEP_TASKS_PER_NODE=2(3)"]),
        ({"SLURM_STEP_ID": "0"}, ["SLURM_PROCID"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS"]),
        ({"TF_CONFIG": "{'cluster'"}, ["TF_CONFIG", "JSON"]),
        ({"TF_CONFIG": "[1]"}, ["TF_CONFIG", "[1]"]),
        ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'}, ["TF_CONFIG", "must read like"]),
        (tf_config({"type": "worker", "index": 0}, worker=["a", "b:1"]), ["host:port"]),
        (tf_config({"type": "worker", "index": 2}, worker=["a:1", "b:1"]), ["'index': 2"]),
        (tf_config({}, worker=["a:1", "b:1"]), ["task", "{}"]),
        (tf_config({"type": "chief", "index": 0}, worker=["a:1", "b:1"]), ["'chief'"]),
        (tf_config({"type": "worker", "index": 0}, worker=["a:1", "a:1"]), ["a:1", "twice"]),
        (tf_config({"type": "worker", "index": 0}, worker=["a:1"], ps=["b:1"]), ["ps"]),
        (tf_config({"type": "evaluator", "index": 0}, worker=["a:1", "b:1"]), ["evaluator"]),
        (
            OPEN_MPI_5 | tf_config({"type": "worker", "index": 0}, worker=["a:1", "b:1"]),
            ["disagree", "TF_CONFIG="],
        ),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(LauncherError) as error:
        from_environment(environ)
    for part in named:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("kind", "index", "expected"),
    [("chief", 0, (0, 4, 0, 2, 0, 2)), ("worker", 0, (1, 4, 0, 2, 1, 2)), ("worker", 2, (3, 4, 1, 2, 1, 2))],
)
def test_tf_config_puts_the_chief_first(kind: str, index: int, expected: tuple[int, ...]) -> None:
    environ = tf_config({"type": kind, "index": index}, worker=["b:1", "a:2", "b:2"], chief=["a:1"])
    spec = from_environment(environ)
    assert place(spec) == expected
    assert spec.addresses == ("a:1", "b:1", "a:2", "b:2")
    assert spec.rendezvous == "tcp://a:1"
    assert spec.job == from_environment(environ).job != ""


def test_ranks_of_one_host_meet_in_a_private_folder() -> None:
    specs = [
        from_environment(OPEN_MPI_5 | {f"OMPI_COMM_WORLD_{name}": rank for name in ("RANK", "LOCAL_RANK")})
        for rank in ("0", "1")
    ]
    assert len({(spec.job, spec.rendezvous) for spec in specs}) == 1
    path = specs[0].rendezvous.removeprefix("file://")
    assert path == f"/tmp/tfdist-{os.getuid()}-openmpi-prterun-vm-7357_1/rendezvous"
    moved = from_environment(OPEN_MPI_5 | {"TMPDIR": "/scratch"}).rendezvous
    assert moved.startswith(f"file:///scratch/tfdist-{os.getuid()}-")


def test_ranks_of_several_hosts_meet_in_the_working_directory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_environment(SLURM_STEP).rendezvous == f"file://{tmp_path}/.tfdist-slurm-812.3.rendezvous"


@pytest.mark.parametrize("environ", [TFDIST, HOROVODRUN, OPEN_MPI_5, HYDRA, SLURM_STEP])
def test_explicit_rendezvous_and_job_win(environ: dict[str, str]) -> None:
    spec = from_environment(environ | {"TFDIST_RENDEZVOUS": "tcp://h:5", "TFDIST_JOB": "mine"})
    assert (spec.rendezvous, spec.job) == ("tcp://h:5", "mine")


def test_size_one_needs_no_rendezvous() -> None:
    one = {
        name: "1" if name.endswith("SIZE") else "0" for name in TFDIST if not name.endswith(("JOB", "VOUS"))
    }
    assert from_environment(one).rendezvous == ""
    assert from_environment({"PMI_RANK": "0", "PMI_SIZE": "1"}).size == 1


@pytest.mark.parametrize(
    ("rank", "local_rank", "cross_rank"),
    [(0, 0, 0), (1, 1, 0), (2, 0, 1), (5, 1, 2)],  # host by host
)
def test_host_number_when_the_launcher_does_not_say(rank: int, local_rank: int, cross_rank: int) -> None:
    values = {"RANK": rank, "SIZE": 6, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}
    spec = from_environment(
        OPEN_MPI_5 | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    )
    assert (spec.cross_rank, spec.cross_size) == (cross_rank, 3)


@pytest.mark.parametrize(("rank", "local_rank", "cross_rank"), [(1, 0, 1), (4, 1, 1)])
def test_host_number_when_ranks_are_dealt_in_turn(rank: int, local_rank: int, cross_rank: int) -> None:
    values = {"RANK": rank, "SIZE": 6, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}
    environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    assert from_environment(OPEN_MPI_5 | environ).cross_rank == cross_rank


def test_hosts_that_ranks_tell_correct_the_estimate() -> None:
    uneven = ClusterSpec(rank=2, size=3, local_size=1, cross_rank=2, cross_size=3, launcher="openmpi")
    corrected = with_hosts(uneven, ["a", "a", "b"])
    assert (corrected.cross_rank, corrected.cross_size) == (1, 2)
    assert with_hosts(uneven, ["a", "a", "a"]) == uneven  # containers that share a name
    told = ClusterSpec(rank=2, size=3, local_size=1, cross_rank=0, cross_size=2, launcher="slurm")
    assert with_hosts(told, ["a", "a", "b"]) == told
