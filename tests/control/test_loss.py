"""Ranks that die, stop, or end without a word."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import pytest

from tests.control.worlds import (
    connect,
    in_threads,
    is_failed,
    open_world,
    processes,
    start_process,
    wait_for,
)
from tfdist.errors import CollectiveTimeoutError, PeerLostError

pytestmark = pytest.mark.alone  # who is late, and who is lost, is a matter of seconds

SLEEP = "time.sleep(60)"
PAUSE = "time.sleep(1.5)\n"  # until the other side is sure to have returned from connect, too
WAIT = """
try:
    plane.exchange('key', 1)
except Exception as error:
    print(type(error).__name__, error)
"""


def pid_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "connected"
    return int(pid)


def test_killed_rank_fails_everybody_at_once(rendezvous: str) -> None:
    with processes([start_process(1, 3, rendezvous, SLEEP), start_process(2, 3, rendezvous, WAIT)]) as (
        victim,
        waiter,
    ):
        plane = connect(0, 3, rendezvous, timeout=30)
        seen: list[tuple[Exception, str]] = []
        plane.on_failure(lambda error: seen.append((error, threading.current_thread().name)))
        pid = pid_of(victim)
        pid_of(waiter)  # it has returned from connect, which the loss would end otherwise
        begin = time.monotonic()
        victim.kill()
        with pytest.raises(PeerLostError) as caught:
            plane.exchange("key", 0)
        assert time.monotonic() - begin < 5  # far below the bounds of silence and exchange
        assert f"Rank 1 (host {socket.gethostname()}, pid {pid}) is gone" in str(caught.value)
        output, _ = waiter.communicate(timeout=10)
        assert f"PeerLostError Rank 1 (host {socket.gethostname()}, pid {pid}) is gone" in output
        wait_for(lambda: seen)
        assert seen == [(plane.failure, "tfdist-control-client")]
        late: list[Exception] = []
        plane.on_failure(late.append)
        assert late == [plane.failure]
        plane.close()


def test_killed_rank_0_fails_everybody_at_once(rendezvous: str) -> None:
    with processes([start_process(0, 3, rendezvous, SLEEP)]) as (host,):
        planes = in_threads([lambda rank=rank: connect(rank, 3, rendezvous, timeout=30) for rank in (1, 2)])
        pid = pid_of(host)
        host.kill()
        begin = time.monotonic()
        for plane in planes:
            wait_for(is_failed(plane, PeerLostError), 5)
            assert f"Rank 0 (host {socket.gethostname()}, pid {pid}) is gone" in str(plane.failure)
            with pytest.raises(PeerLostError):
                plane.exchange("key", 1)
        in_threads([plane.close for plane in planes])
        assert time.monotonic() - begin < 8


@pytest.mark.parametrize("rank", [0, 1])
def test_end_by_an_exception_is_a_loss_at_once_and_adds_no_output(rank: int, rendezvous: str) -> None:
    body = f"{PAUSE}raise ValueError('first error')"
    with processes([start_process(rank, 2, rendezvous, body)]) as (failing,):
        plane = connect(1 - rank, 2, rendezvous, timeout=30)
        wait_for(is_failed(plane, PeerLostError))
        assert f"Rank {rank} " in str(plane.failure)
        plane.close()
        _, errors = failing.communicate(timeout=10)
        assert errors.strip().endswith("ValueError: first error")
        assert errors.count("Traceback") == 1


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_regular_end_prints_nothing_and_is_quick(rank: int, closes: bool, rendezvous: str) -> None:
    close = "begin = time.monotonic()\nplane.close()\nprint(time.monotonic() - begin)"
    body = PAUSE + (close if closes else "")
    with processes([start_process(rank, 2, rendezvous, body)]) as (ending,):
        plane = connect(1 - rank, 2, rendezvous, timeout=30)
        output, errors = ending.communicate(timeout=10)
        assert errors == ""
        assert ending.returncode == 0
        if closes:
            assert float(output.split()[-1]) < 5
            time.sleep(0.2)
            assert plane.failure is None
        else:
            wait_for(is_failed(plane, PeerLostError))
        plane.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_process_is_late_first_and_lost_after_the_silence_bound(rank: int, rendezvous: str) -> None:
    options = {"silence": 3.0, "timeout": 30}
    with processes([start_process(rank, 2, rendezvous, SLEEP, **options)]) as (stopped,):
        plane = connect(1 - rank, 2, rendezvous, **options)
        pid = pid_of(stopped)
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        time.sleep(1.5)
        assert plane.failure is None
        wait_for(is_failed(plane, PeerLostError), 10)
        assert time.monotonic() - begin > 2
        assert f"Rank {rank} (host {socket.gethostname()}, pid {pid})" in str(plane.failure)
        assert "though" in str(plane.failure)
        plane.close()
        os.kill(pid, signal.SIGCONT)


def test_process_that_goes_on_in_time_is_not_lost_and_blames_nobody(rendezvous: str) -> None:
    """Both stop longer than the silence bound: none may take its own pause for the other's silence."""
    options = {"silence": 5.0, "timeout": 30}  # heartbeats come every second
    body = "print(plane.exchange('key', 1), plane.failure)\nplane.close()"
    begin = [start_process(rank, 2, rendezvous, f"time.sleep(9)\n{body}", **options) for rank in (0, 1)]
    with processes(begin) as both:
        pids = [pid_of(process) for process in both]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6.5)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for process in both:
            output, errors = process.communicate(timeout=20)
            assert errors == ""
            assert output == "[1, 1] None\n"


def test_rank_that_was_given_up_learns_it(rendezvous: str) -> None:
    options = {"silence": 2.0, "timeout": 30}
    with processes([start_process(1, 2, rendezvous, f"time.sleep(4)\n{WAIT}", **options)]) as (stopped,):
        plane = connect(0, 2, rendezvous, **options)
        pid = pid_of(stopped)
        os.kill(pid, signal.SIGSTOP)
        wait_for(is_failed(plane, PeerLostError), 10)
        os.kill(pid, signal.SIGCONT)
        output, _ = stopped.communicate(timeout=15)
        assert "PeerLostError Rank 1" in output
        plane.close()


def test_process_that_dies_during_the_start(rendezvous: str) -> None:
    """It said hello and vanished; the others need not wait for the bound to know."""
    outcome: list[Any] = []

    def first() -> None:
        outcome.extend(in_threads([lambda: connect(0, 3, rendezvous, timeout=25)]))

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    with processes([start_process(1, 3, rendezvous, SLEEP, timeout=25)]) as (victim,):
        time.sleep(1.5)
        victim.kill()
        thread.join(10)
    assert isinstance(outcome[0], PeerLostError)
    assert "Rank 1" in str(outcome[0])


def test_interrupted_exchange_leaves_the_channel_usable(rendezvous: str) -> None:
    body = (
        "import threading\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n    plane.exchange('never', 1)\nexcept KeyboardInterrupt:\n    pass\n"
        "print(plane.exchange('key', 1))\nplane.close()"
    )
    with processes([start_process(1, 2, rendezvous, body)]) as (interrupted,):
        plane = connect(0, 2, rendezvous, timeout=30)
        assert plane.exchange("key", 0) == [0, 1]
        output, errors = interrupted.communicate(timeout=10)
        assert "[0, 1]" in output
        assert errors == ""
        plane.close()


def test_early_end_with_a_reason_fails_the_others(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        planes[1].close(error="ValueError: first error")
        for plane in (planes[0], planes[2]):
            wait_for(is_failed(plane, PeerLostError))
            assert "Rank 1" in str(plane.failure)
            assert "ValueError: first error" in str(plane.failure)


@pytest.mark.parametrize("early", [0, 1])
def test_lingering_rank_stays_until_the_others_are_done(early: int, rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        ended = threading.Event()

        def leave() -> None:
            planes[early].close(linger=20.0)
            ended.set()

        def stay(rank: int) -> list[int]:
            time.sleep(4.0)  # longer than a server serves for others after its own rank's goodbye
            assert not ended.is_set()
            met: list[int] = planes[rank].exchange("key", rank, ranks=others)
            planes[rank].close()
            return met

        others = [rank for rank in range(3) if rank != early]
        assert in_threads([leave, *(lambda rank=rank: stay(rank) for rank in others)]) == [
            None,
            others,
            others,
        ]


def test_lingering_rank_leaves_when_its_bound_passes_or_another_fails(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        begin = time.monotonic()
        planes[1].close(linger=3.0)
        assert 2.5 < time.monotonic() - begin < 6.0
        fail = threading.Timer(0.5, lambda: planes[0].close(error="ValueError: first error"))
        fail.start()
        begin = time.monotonic()
        planes[2].close(linger=20.0)
        assert time.monotonic() - begin < 5.0
        fail.join()


def test_lingering_rank_is_not_waited_for(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        leaving = threading.Thread(target=lambda: planes[1].close(linger=20.0))
        leaving.start()
        with pytest.raises(PeerLostError, match="rank 1 already left"):
            planes[0].exchange("key", 0)
        planes[0].close()
        leaving.join(5.0)
        assert not leaving.is_alive()


def test_callback_that_fails_does_not_stop_the_others(
    rendezvous: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_world(2, rendezvous) as planes:
        seen: list[Exception] = []

        def broken(error: Exception) -> None:
            raise RuntimeError("broken callback")

        planes[0].on_failure(broken)
        planes[0].on_failure(seen.append)
        planes[1].close(error="end")
        wait_for(lambda: seen)
        assert "broken callback" in caplog.text


def test_first_failure_stays(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        planes[1].close(error="first")
        wait_for(is_failed(planes[0], PeerLostError))
        planes[2].close(error="second")
        time.sleep(0.2)
        assert "first" in str(planes[0].failure)


def test_server_that_does_not_answer_is_a_timeout_and_no_hang(
    rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfdist.control.client._SLACK", 0.5)
    with processes([start_process(0, 2, rendezvous, SLEEP)]) as (host,):
        plane = connect(1, 2, rendezvous, timeout=30)
        pid = pid_of(host)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(CollectiveTimeoutError, match=rf"Rank 0 .*pid {pid}.* is stopped or busy"):
            plane.exchange("key", None, timeout=0.5)
        os.kill(pid, signal.SIGCONT)
        plane.close()


def test_expendable_rank_is_lost_without_ending_the_world(rendezvous: str) -> None:
    planes = in_threads(
        [lambda rank=rank: connect(rank, 3, rendezvous, expendable=rank == 2) for rank in range(3)]  # type: ignore[misc]
    )
    try:
        planes[2]._client._line.hang_up()  # as when its process is killed
        wait_for(lambda: 2 in planes[0].lost and 2 in planes[1].lost)
        assert "Rank 2" in planes[0].lost[2]
        assert planes[0].failure is None
        answers = in_threads(
            [lambda plane=plane: plane.exchange("go on", 1, ranks=[0, 1]) for plane in planes[:2]]
        )  # type: ignore[misc]
        assert answers == [[1, 1], [1, 1]]
    finally:
        for plane in reversed(planes):
            plane.close()


def test_dismissal_ends_the_wait_of_those_that_serve(rendezvous: str) -> None:
    planes = in_threads([lambda rank=rank: connect(rank, 3, rendezvous) for rank in range(3)])  # type: ignore[misc]

    def dismiss() -> None:
        time.sleep(0.3)
        planes[0].close(dismiss=True)

    began = time.monotonic()
    assert in_threads([dismiss, planes[1].wait_for_end, planes[2].wait_for_end]) == [None] * 3
    assert time.monotonic() - began < 3.0
    for plane in planes:
        plane.close()


def test_failure_ends_the_wait_of_those_that_serve(rendezvous: str) -> None:
    planes = in_threads([lambda rank=rank: connect(rank, 2, rendezvous) for rank in range(2)])  # type: ignore[misc]
    planes[0].close(error="ValueError: on purpose", dismiss=True)
    with pytest.raises(PeerLostError, match=r"Rank 0 .* ended early: ValueError: on purpose"):
        planes[1].wait_for_end()
    planes[1].close()
