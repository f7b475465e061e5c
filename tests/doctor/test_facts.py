"""Facts are seen as they are, and nothing secret among them."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest

from tfdist.doctor import facts as facts_module
from tfdist.doctor.facts import describe_mpirun, gather_facts, spares_local


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the two questions that cost an import of TensorFlow."""
    monkeypatch.setattr(facts_module, "_ask_frameworks", lambda environ, timeout: {})
    monkeypatch.setattr(facts_module, "_describe_horovod", lambda timeout: None)


@pytest.mark.usefixtures("quick")
def test_secrets_in_the_environment_stay_there() -> None:
    environ = {
        "https_proxy": "http://me:password@proxy:3128",
        "HTTP_PROXY": "http://me:password@proxy:3128",
        "TFDIST_SECRET": "password",
    }
    facts = gather_facts(environ, timeout=10)
    assert set(facts.proxies) == {"http_proxy", "https_proxy"}
    assert "password" not in json.dumps(dataclasses.asdict(facts))


@pytest.mark.usefixtures("quick")
def test_launcher_is_seen_or_its_contradiction_named() -> None:
    inside = {
        "TFDIST_JOB": "job",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    facts = gather_facts(inside, timeout=10)
    assert (facts.launcher, facts.launcher_place, facts.launcher_size) == ("openmpi", "rank 1 of 4", 4)
    broken = gather_facts({**inside, "OMPI_COMM_WORLD_RANK": "7"}, timeout=10)
    assert broken.launcher_error


@pytest.mark.usefixtures("quick")
def test_keras_backend_comes_from_variable_or_file(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text("{}")
    home = {"KERAS_HOME": str(tmp_path)}
    assert gather_facts(home, timeout=10).keras_backend_source == str(tmp_path / "keras.json")
    assert gather_facts({**home, "KERAS_BACKEND": "jax"}, timeout=10).keras_backend_source == "KERAS_BACKEND"
    assert gather_facts({"KERAS_HOME": str(tmp_path / "none")}, timeout=10).keras_backend_source == ""


@pytest.mark.usefixtures("quick")
def test_foreign_address_of_own_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # 192.0.2.0/24 is reserved for documentation: no machine has it.
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "192.0.2.1")
    facts = gather_facts({}, timeout=10)
    assert (facts.host_address, facts.host_is_own) == ("192.0.2.1", False)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.0.1")
    assert gather_facts({}, timeout=10).host_is_own

    def unknown(host: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert gather_facts({}, timeout=10).host_address == ""


def test_frameworks_that_crash_or_hang_are_facts_not_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_describe_horovod", lambda timeout: None)
    monkeypatch.setattr(facts_module, "_ASK_FRAMEWORKS", "import os; os.abort()")
    assert "code -6" in gather_facts({}, timeout=30).tensorflow_error
    monkeypatch.setattr(facts_module, "_ASK_FRAMEWORKS", "import time; time.sleep(60)")
    assert "more than 1 s" in gather_facts({}, timeout=1).tensorflow_error


@pytest.mark.parametrize(
    ("no_proxy", "spared"),
    [
        ("localhost,127.0.0.1", True),
        ("localhost, 127.0.0.0/8, .corp", True),
        ("*", True),
        ("localhost", False),
        ("", False),
    ],
)
def test_proxy_exemptions(no_proxy: str, spared: bool) -> None:
    assert spares_local(no_proxy) == spared


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org\n", "Open MPI 5.0.11"),
        ("HYDRA build details:\n    Version:         4.0.2\n    CC: gcc\n", "MPICH 4.0.2"),
        ("\nIntel(R) MPI Library, Version 2021.13\n", "Intel(R) MPI Library, Version 2021.13"),
        ("", "unknown MPI"),
    ],
)  # fmt: skip
def test_mpirun_is_named(said: str, name: str) -> None:
    assert describe_mpirun(said) == name
