"""Contenders start, take turns, and end, whatever happens. Their ranks are fakes without TensorFlow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tfdist.bench.worlds import ContenderError, World, closing_all, take_turns

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
FAKE = "tests.bench.fake_ranks"


def _world(name: str = "fake", size: int = 2, *, fault: str = "", **options: object) -> World:
    return World(name, size, module=FAKE, options={"fault": fault}, variables={}, **options)  # type: ignore[arg-type]


def _ranks_alive() -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "tfdist.bench.ranks" in child.cmdline()
    ]


def test_ranks_exchange_answer_in_order_and_end() -> None:
    world = _world(size=3)
    try:
        answers = world.ask({"word": "hello"})
    finally:
        world.close()
    assert [answer["rank"] for answer in answers] == [0, 1, 2]
    assert {tuple(answer["seen"]) for answer in answers} == {(0, 10, 20)}
    assert {answer["word"] for answer in answers} == {"hello"}
    assert not any(psutil.pid_exists(answer["pid"]) for answer in answers)


def test_only_tfdist_worlds_get_tfdists_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setenv("TFDIST_RANK", "7")
    with closing_all([_world("plain"), _world("ours", backend="tf")]) as worlds:
        plain, ours = (world.ask({"word": ""})[0] for world in worlds)
    assert (plain["tfdist"], ours["tfdist"]) == ([], ["TFDIST_RANK", "TFDIST_SIZE"])
    assert plain["threads"] == ours["threads"] is not None
    assert plain["legacy"] is None
    assert ours["legacy"] is None


def test_those_who_wait_are_stopped() -> None:
    with closing_all([_world("a", 1), _world("b", 1)]) as worlds:
        pids = [world.ask({"word": ""})[0]["pid"] for world in worlds]
        for world in worlds:
            world.pause()
        rounds = take_turns(worlds, {"word": "turn"}, rounds=3)
        states = [_settled_state(pid) for pid in pids]
    assert [[answers[0]["word"] for answers in one] for one in rounds] == [["turn"] * 3] * 2
    assert [one[0][0]["pid"] for one in rounds] == pids
    assert states == [psutil.STATUS_STOPPED] * 2


def _settled_state(pid: int) -> str:
    deadline = time.monotonic() + 5
    while (state := psutil.Process(pid).status()) != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    return str(state)


def test_rank_that_fails_at_the_start_is_quoted() -> None:
    with pytest.raises(ContenderError, match=r"(?s)^fake: .*RuntimeError: rank 1 does not feel well"):
        _world(fault="raise")
    assert _ranks_alive() == []


def test_rank_that_is_late_ends_the_wait() -> None:
    with pytest.raises(ContenderError, match=r"fake did not answer on rank 1 within 3 s \(--timeout\)"):
        _world(fault="late", timeout=3)
    assert _ranks_alive() == []


def test_rank_that_ends_instead_of_answering() -> None:
    with closing_all([_world(fault="exit")]) as worlds, pytest.raises(ContenderError, match="ended"):
        worlds[0].ask({"word": ""})
    assert _ranks_alive() == []


def test_rank_that_died_between_turns() -> None:
    with closing_all([_world()]) as worlds:
        pid = worlds[0].ask({"word": ""})[1]["pid"]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ContenderError, match=r"fake: rank 1 ended|process ended"):
            worlds[0].ask({"word": ""})


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_not_even_a_killed_bench_leaves_stopped_ranks() -> None:
    program = (
        "import sys, time\n"
        "from tfdist.bench.worlds import World\n"
        f"world = World('fake', 2, module={FAKE!r}, options={{}}, variables={{}})\n"
        "pids = [answer['pid'] for answer in world.ask({'word': ''})]\n"
        "world.pause()\n"
        "print(*pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stdout is not None
        pids = [int(word) for word in bench.stdout.readline().split()]
        os.kill(bench.pid, signal.SIGKILL)
    assert len(pids) == 2
    gone, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=10)
    assert not alive, gone
