from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.control.worlds import connect, free_port, in_threads, make_spec, open_world, play, wait_for
from tfdist.cluster import ClusterSpec
from tfdist.control import ControlPlane
from tfdist.control import rendezvous as meeting
from tfdist.control.rendezvous import Address
from tfdist.errors import CollectiveTimeoutError, LauncherError, PeerLostError


def path_of(rendezvous: str) -> Path:
    return Path(rendezvous.removeprefix("file://"))


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_barrier_and_roster(size: int, rendezvous: str) -> None:
    rosters = play(size, rendezvous, lambda plane: plane.roster)
    assert rosters == [[{"rank": rank} for rank in range(size)]] * size
    assert not path_of(rendezvous).exists()


def test_size_1_needs_no_rendezvous() -> None:
    plane = ControlPlane.connect(ClusterSpec(), hello={"a": 1}, timeout=10)
    assert plane.exchange("key", "x") == ["x"]
    assert plane.allocate("key", 2) == 1
    assert plane.status()[0].alive
    plane.close()


def test_nobody_returns_before_the_last_rank_came(rendezvous: str) -> None:
    returned: list[int] = []

    def early(rank: int) -> None:
        plane = connect(rank, 3, rendezvous)
        returned.append(rank)
        plane.close()

    def late() -> None:
        time.sleep(0.5)
        assert returned == []
        early(2)

    assert in_threads([lambda: early(0), lambda: early(1), late]) == [None] * 3


def test_rank_0_may_come_last(rendezvous: str) -> None:
    def body(rank: int) -> list[Any]:
        if rank == 0:
            time.sleep(0.5)
        plane = connect(rank, 3, rendezvous)
        plane.close()
        return plane.roster

    rosters = in_threads([lambda: body(0), lambda: body(1), lambda: body(2)])
    assert rosters == [[{"rank": rank} for rank in range(3)]] * 3


@pytest.mark.parametrize("secret", [None, b"shared"])
def test_tcp_rendezvous_frees_its_port(secret: bytes | None) -> None:
    port = free_port()
    with open_world(3, f"tcp://localhost:{port}", secret=secret) as planes:
        assert planes[2].exchange("alone", 1, ranks=[2]) == [1]
        with socket.socket() as server:  # as TensorFlow's own server does next
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


def test_job_that_spans_hosts_uses_the_named_address() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    spans = {"local_size": 1, "local_rank": 0, "cross_size": 2}
    assert len(play(2, url, lambda plane: plane.roster, spec=spans, host="127.0.0.1")[1]) == 2


def test_hello_carries_bytes_and_is_checked(rendezvous: str) -> None:
    with pytest.raises(TypeError, match="object"):
        ControlPlane.connect(make_spec(0, 2, rendezvous), hello={"a": object()}, timeout=1)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_wait_without_bound_is_refused(timeout: float, rendezvous: str) -> None:
    with pytest.raises(ValueError, match="bound"):
        connect(0, 2, rendezvous, timeout=timeout)


# Missing ranks.


def test_missing_rank_is_named_on_all(rendezvous: str) -> None:
    begin = time.monotonic()
    outcomes = in_threads([lambda rank=rank: connect(rank, 4, rendezvous, timeout=1.5) for rank in (0, 1, 3)])
    assert time.monotonic() - begin < 6
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveTimeoutError)
        assert "rank 2 did not start within 1.5 s: 3 of 4" in str(outcome)
        assert rendezvous in str(outcome)
        assert "init(timeout=...)" in str(outcome)
    assert not path_of(rendezvous).exists()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_bound_holds_when_rank_0_never_shows_up(kind: str, rendezvous: str) -> None:
    url = rendezvous if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="rank 0 could not be reached within 1 s") as caught:
        connect(1, 2, url, timeout=1)
    assert time.monotonic() - begin < 4
    assert url in str(caught.value)


def test_rank_that_gives_up_first_ends_the_start_for_all(rendezvous: str) -> None:
    outcomes = in_threads(
        [lambda: connect(0, 3, rendezvous, timeout=25), lambda: connect(1, 3, rendezvous, timeout=1)]
    )
    assert [type(outcome) for outcome in outcomes] == [CollectiveTimeoutError] * 2
    assert "Rank 1" in str(outcomes[0])
    assert "gave up" in str(outcomes[0])
    assert "rank 2 did not start" in str(outcomes[1])


# Contradictions.


def test_two_processes_claim_one_rank(rendezvous: str) -> None:
    outcomes = in_threads([lambda rank=rank: connect(rank, 3, rendezvous) for rank in (0, 1, 1)])
    for outcome in outcomes:
        assert isinstance(outcome, LauncherError)
        assert "both claim rank 1" in str(outcome)


def test_two_processes_claim_rank_0(rendezvous: str) -> None:
    outcomes = in_threads([lambda rank=rank: connect(rank, 3, rendezvous) for rank in (0, 0)])
    for outcome in outcomes:
        assert isinstance(outcome, LauncherError)
        assert "both claim rank 0" in str(outcome)


def test_rank_0_notices_that_another_replaced_its_entry(rendezvous: str) -> None:
    def intrude() -> None:
        wait_for(path_of(rendezvous).exists)
        meeting.publish(path_of(rendezvous), Address("127.0.0.1", 9, b"k", "job", "other"), replace=True)

    outcome, _ = in_threads([lambda: connect(0, 2, rendezvous), intrude])
    assert isinstance(outcome, LauncherError)
    assert "both claim rank 0" in str(outcome)
    assert meeting.read(path_of(rendezvous)).instance == "other"


def test_second_rank_0_at_a_tcp_rendezvous() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    outcomes = in_threads([lambda: connect(0, 2, url, timeout=1.5), lambda: connect(0, 2, url, timeout=1.5)])
    assert {type(outcome) for outcome in outcomes} == {LauncherError, CollectiveTimeoutError}


def test_rank_claimed_again_in_a_running_world_disturbs_nobody(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        with pytest.raises(LauncherError, match="both claim rank 1"):
            connect(1, 2, rendezvous)
        with pytest.raises(LauncherError, match="both claim rank 0"):
            connect(0, 2, rendezvous)
        assert in_threads([lambda plane=plane: plane.exchange("k", 1) for plane in planes]) == [[1, 1]] * 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"size": 3}, "size 3"), ({"job": "other"}, "job 'other'"), ({"rank": 7}, "Ranks must be in 0..3")],
)
def test_contradicting_ranks(changes: dict[str, Any], text: str, rendezvous: str) -> None:
    outcomes = in_threads(
        [
            lambda: connect(0, 4, rendezvous),
            lambda: connect(2, 4, rendezvous),
            lambda: (time.sleep(0.5), connect(1, 4, rendezvous, spec=changes))[1],
        ]
    )
    for outcome in outcomes:
        assert isinstance(outcome, LauncherError)
        assert text in str(outcome)


def test_other_protocol_version(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def newer() -> ControlPlane:
        time.sleep(0.5)
        monkeypatch.setattr("tfdist.control.plane.PROTOCOL", 99)
        return connect(1, 2, rendezvous)

    outcomes = in_threads([lambda: connect(0, 2, rendezvous), newer])
    for outcome in outcomes:
        assert isinstance(outcome, LauncherError)
        assert "same version" in str(outcome)


def test_failed_start_can_be_repeated(rendezvous: str) -> None:
    with pytest.raises(CollectiveTimeoutError):
        connect(0, 2, rendezvous, timeout=0.5)
    assert len(play(2, rendezvous, lambda plane: plane.roster)[0]) == 2


def test_crash_during_the_start_is_told(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        plane_wait = ControlPlane._await_start

        def wait(plane: ControlPlane, deadline: float, where: str) -> None:
            if plane.spec.rank == 1:
                raise KeyboardInterrupt
            plane_wait(plane, deadline, where)

        monkeypatch.setattr(ControlPlane, "_await_start", wait)
        connect(1, 3, rendezvous)

    outcomes = in_threads([lambda: connect(0, 3, rendezvous), interrupted])
    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], PeerLostError)
    assert "KeyboardInterrupt" in str(outcomes[0])


# Stale entries and strangers at the address.


@contextlib.contextmanager
def stranger_at_a_port(greeting: bytes) -> Any:
    """A foreign server that says `greeting` and then nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])
                    taken[-1].sendall(greeting)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for sock in taken:
            sock.close()


@pytest.mark.parametrize("greeting", [b"", b"220 mail.example.org ESMTP ready to go, if you ask nicely\r\n"])
def test_stale_file_that_leads_to_a_stranger(greeting: bytes, rendezvous: str) -> None:
    with stranger_at_a_port(greeting) as port:
        stale = Address("127.0.0.1", port, b"old", "job", "old")
        assert meeting.publish(path_of(rendezvous), stale, replace=False)

        def body(rank: int) -> int:
            if rank == 0:
                time.sleep(0.3)
            plane = connect(rank, 2, rendezvous, timeout=20)
            plane.close()
            return len(plane.roster)

        assert in_threads([lambda: body(0), lambda: body(1)]) == [2, 2]


def test_stale_file_that_leads_nowhere(rendezvous: str) -> None:
    stale = Address("127.0.0.1", free_port(), b"old", "job", "old")
    meeting.publish(path_of(rendezvous), stale, replace=False)
    assert len(play(2, rendezvous, lambda plane: plane.roster)[1]) == 2


def test_file_of_an_earlier_run_that_still_lives(rendezvous: str, tmp_path: Path) -> None:
    """Its rank 0 answers with authority, but for another job; the new ranks wait for theirs."""
    with open_world(2, rendezvous, spec={"job": "old"}) as old:
        outcomes = in_threads(
            [
                lambda: (time.sleep(0.5), connect(0, 2, rendezvous))[1],
                lambda: connect(1, 2, rendezvous),
            ]
        )
        assert [len(plane.roster) for plane in outcomes] == [2, 2]
        assert in_threads([lambda plane=plane: plane.exchange("k", 1) for plane in old]) == [[1, 1]] * 2
        in_threads([plane.close for plane in outcomes])


def test_secret_keeps_the_key_out_of_the_file(rendezvous: str) -> None:
    with open_world(2, rendezvous, secret=b"shared"):
        content = json.loads(path_of(rendezvous).read_text())
        assert content["key"] == ""
        assert os.stat(path_of(rendezvous)).st_mode & 0o077 == 0


@pytest.mark.parametrize("theirs", [b"wrong", None])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_wrong_secret(kind: str, theirs: bytes | None, rendezvous: str) -> None:
    url = rendezvous if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    outcomes = in_threads(
        [
            lambda: connect(0, 2, url, secret=b"right", timeout=2),
            lambda: connect(1, 2, url, secret=theirs, timeout=1.5),
        ]
    )
    assert [type(outcome) for outcome in outcomes] == [CollectiveTimeoutError] * 2
    assert "TFDIST_SECRET" in str(outcomes[1])
    if kind == "tcp" or theirs:
        assert "held another key" in str(outcomes[0])
