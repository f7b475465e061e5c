"""When something goes wrong on one rank: every rank ends, and says which rank it was and what happened.

Ranks started by `tfdist run` show what its user sees. Ranks started by the test itself show what a rank finds
out without a launcher that ends it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.distributed.jobs import SCRIPTS, Ahead, Ended, records_in, run_ahead, start, tfdist_run

pytestmark = pytest.mark.alone

TIMEOUT = 15  # seconds of tfdist's own bound; ranks start several seconds apart on a busy machine
ALONE = 5  # the same where no other rank is waited for
SOON = 45.0  # seconds; a peer that needs longer for its error hangs rather than works
ENGINES = ("tf", "horovod")
LAUNCHERS = {
    "mpirun": ["mpirun", "-np", "2", "--oversubscribe", "--allow-run-as-root"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "2"],
}


def run(fault: str, folder: Path) -> Ended:
    """Runs a job named `launcher mode engine`."""
    how, mode, engine = fault.split()
    bound = ALONE if mode.startswith("alone") else TIMEOUT
    common = {"TFDIST_TIMEOUT": str(bound), "TFDIST_BACKEND": engine, "TMPDIR": str(folder)}
    if how == "run":
        job = start(tfdist_run("faults.py", mode), **common)
        if mode == "endless":
            # Each rank says so in every epoch, and these are short.
            job.wait_until(lambda: all(f"[{rank}] training" in job.output() for rank in (0, 1)))
            job.processes[0].send_signal(signal.SIGKILL)
        return job.result()
    if how in LAUNCHERS:
        return start([*LAUNCHERS[how], sys.executable, str(SCRIPTS / "faults.py"), mode], **common).result()
    ranks = {"alone0": [0], "alone1": [1]}.get(mode, [0, 1])
    place = {
        "TFDIST_SIZE": "2",
        "TFDIST_LOCAL_SIZE": "2",
        "TFDIST_JOB": f"faults-{mode}",
        "TFDIST_RENDEZVOUS": f"file://{folder}/rendezvous/file",
    }
    each = [{"TFDIST_RANK": str(rank), "TFDIST_LOCAL_RANK": str(rank)} for rank in ranks]
    command = [sys.executable, str(SCRIPTS / "faults.py"), mode]
    return start(*([command] * len(ranks)), each=each, **common, **place).result()


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead[Ended]]:
    yield from run_ahead(request, "fault", lambda fault: run(fault, tmp_path_factory.mktemp("faults")))


def faults(*modes: str, engines: tuple[str, ...] = ENGINES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", [f"{mode} {engine}" for mode in modes for engine in engines])


def finish(fault: str, ended: Ahead[Ended]) -> Ended:
    require(fault.split()[-1])
    job = ended[fault]
    assert not job.orphans, job.orphans
    return job


def error_of(job: Ended, rank: int) -> dict[str, Any]:
    """What a rank raised, with the seconds since rank 1 announced its fault."""
    records = records_in(job.output)
    (error,) = [record for record in records if record["rank"] == rank and "kind" in record]
    begins = [record["at"] for record in records if record.get("what", "").startswith("about to")]
    return {**error, "after": error["at"] - begins[0] if begins else 0.0}


# What a rank finds out by itself


@faults("bare raise")
def test_peers_of_an_exception_get_its_text(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [1, 1]
    assert_rank_0_knows_the_exception(job)


@faults("mpirun raise", engines=("horovod",))
def test_peers_of_an_exception_get_its_text_over_mpi(fault: str, ended: Ahead[Ended]) -> None:
    # Horovod over MPI tells its peers of its end faster than anything else, but not the reason.
    job = finish(fault, ended)
    assert job.codes == [1]
    assert_rank_0_knows_the_exception(job)


def assert_rank_0_knows_the_exception(job: Ended) -> None:
    error = error_of(job, 0)
    assert error["kind"] == "PeerFailedError"
    assert "rank 1 with ValueError: my callback broke" in error["text"]
    assert error["after"] < SOON


@faults("bare alone0", "bare alone1", engines=("tf",))
def test_rank_that_never_starts_is_named(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [1]
    here = int(fault.split()[1][-1])
    error = error_of(job, here)
    assert error["kind"] == "CollectiveTimeoutError"
    assert f"rank {1 - here}" in error["text"]
    assert f"{ALONE} s" in error["text"]


# What the user of `tfdist run` sees


@faults("run raise")
def test_first_traceback_comes_last(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [1]
    assert "rank 1 failed first, with exit code 1" in job.summary()
    assert "in raise_here" in job.summary()
    assert job.summary().rstrip().endswith("[1] ValueError: my callback broke")


@faults("run kill", engines=("tf",))
def test_killed_rank_is_named_by_the_launcher(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [128 + signal.SIGKILL]
    assert "rank 1 failed first, with SIGKILL" in job.summary()


@faults("run sleep")
def test_sleeping_rank_is_named_after_the_timeout(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [1]
    error = error_of(job, 0)
    assert error["kind"] == "CollectiveTimeoutError"
    assert "rank 1 (host" in error["text"]
    assert "did not arrive at \"train step 5 of model 'sequential'\"" in error["text"]
    assert "it finished \"train step 4 of model 'sequential'\"" in error["text"]
    assert error["after"] < TIMEOUT + SOON
    assert "rank 0 failed first" in job.summary()
    assert "[0] tfdist.errors.CollectiveTimeoutError" in job.summary()


@faults("run stop", engines=("tf",))
def test_stopped_rank_is_named(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [1]
    error = error_of(job, 0)
    assert error["kind"] in ("CollectiveTimeoutError", "PeerLostError")
    assert "rank 1" in error["text"].lower()
    assert error["after"] < TIMEOUT + SOON


@faults("run exit")
def test_rank_that_leaves_in_the_middle_is_named(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [1]
    error = error_of(job, 0)
    assert error["kind"] == "PeerLostError"
    assert "\"train step 5 of model 'sequential'\" can't complete" in error["text"]
    assert "it finished \"train step 4 of model 'sequential'\"" in error["text"]
    assert error["after"] < SOON
    assert "rank 0 failed first" in job.summary()


@faults("run endless")
def test_killed_launcher_leaves_nothing(fault: str, ended: Ahead[Ended]) -> None:
    job = finish(fault, ended)
    assert job.codes == [-signal.SIGKILL]
