"""One engine for all ranks, or an error that names the rank, the reason and the fix."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tfdist.cluster import ClusterSpec
from tfdist.collectives import select, tf_server
from tfdist.collectives.horovod_start import choose_controller
from tfdist.errors import BackendUnavailableError, LauncherError

TWO = ClusterSpec(rank=0, size=2, local_size=2, launcher="tfdist")


class Control:
    """A control channel whose ranks offered these facts."""

    def __init__(self, *roster: dict[str, Any]) -> None:
        self.roster = list(roster)


def facts(backend: str = "auto", problem: str = "Horovod is not installed") -> dict[str, Any]:
    return {
        "backend": backend,
        "tf_host": "127.0.0.1",
        "tf_port": 1,
        "horovod": {"problem": problem, "gloo": True, "mpi": False},
        "nccl": False,
        "process_sets": [],
    }


def choose(backend: str, *roster: dict[str, Any]) -> Any:
    return select.choose(TWO, Control(*roster), backend=backend, timeout=5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "tf", "horovod", "single"])
def test_alone_is_always_single(backend: str) -> None:
    assert select.choose(ClusterSpec(), None, backend=backend, timeout=1.0).name == "single"


def test_horovod_that_a_rank_lacks_is_an_error_with_the_fix() -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"rank 1: Horovod is not installed.*tfdist build-horovod"
    ):
        choose("horovod", facts("horovod", ""), facts("horovod"))


def test_ranks_must_ask_for_the_same() -> None:
    with pytest.raises(LauncherError, match=r"tf on rank 0, horovod on rank 1"):
        choose("tf", facts("tf"), facts("horovod"))


def test_ranks_must_give_the_same_process_sets() -> None:
    with pytest.raises(LauncherError, match=r"\[\[0\]\] on rank 0, dynamic on rank 1"):
        choose("tf", facts("tf") | {"process_sets": [[0]]}, facts("tf") | {"process_sets": "dynamic"})


def test_single_is_for_one_rank() -> None:
    with pytest.raises(BackendUnavailableError, match="this one has 2"):
        choose("single", facts("single"), facts("single"))


@pytest.mark.parametrize(
    ("problems", "engine"), [(("", ""), "horovod"), (("", "too old"), "tf"), (("no", "no"), "tf")]
)
def test_auto_takes_horovod_only_if_all_have_it(
    monkeypatch: pytest.MonkeyPatch, problems: tuple[str, str], engine: str
) -> None:
    monkeypatch.setattr(select, "_start_horovod", lambda *_: "horovod")
    monkeypatch.setattr(select, "_start_tf", lambda *_: "tf")
    assert choose("auto", *(facts(problem=problem) for problem in problems)) == engine


@pytest.mark.parametrize(
    ("launcher", "gloo", "mpi", "controller"),
    [
        ("tfdist", True, True, "gloo"),
        ("tfdist", False, True, ""),
        ("horovodrun", True, False, "gloo"),
        ("openmpi", True, True, "mpi"),
        ("openmpi", True, False, "gloo"),
        ("slurm", False, True, "mpi"),
        ("none", False, False, ""),
    ],
)
def test_controller_by_launcher_and_build(launcher: str, gloo: bool, mpi: bool, controller: str) -> None:
    assert choose_controller(ClusterSpec(launcher=launcher), gloo=gloo, mpi=mpi) == controller


def test_reserved_port_is_nobody_elses() -> None:
    port = tf_server.reserve_port()
    assert tf_server.reserve_port() == port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_late_init_is_an_error_that_says_what_to_do() -> None:
    import tensorflow as tf

    tf.constant(1)
    with pytest.raises(BackendUnavailableError, match=r"rank 1.*before the first TensorFlow"):
        tf_server.configure_server(["127.0.0.1:1", "127.0.0.1:2"], rank=1)
