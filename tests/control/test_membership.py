from __future__ import annotations

from typing import Any

import pytest

from tfdist.control.connection import Connection
from tfdist.control.frames import Part
from tfdist.control.membership import PROTOCOL, Membership

HELLO = Part.of(b"")


class Recorder(Connection):
    """A connection that only records what is sent to it."""

    def __init__(self) -> None:
        self.rank = None
        self.sections, self.left, self.heard = [], None, 0.0
        self.sent: list[dict[str, Any]] = []

    def send(self, header: dict[str, Any], parts: Any = ()) -> None:
        self.sent.append(header)

    def close_when_sent(self) -> None:
        self.sent.append({"type": "closed"})


@pytest.fixture
def membership() -> Membership:
    return Membership(size=2, job="job", owner="owner", where="file:///here")


def hello(rank: int, instance: str, **changes: Any) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "job": "job",
        "size": 2,
        "rank": rank,
        "instance": instance,
        "host": "h",
        "pid": 7,
        **changes,
    }


def test_only_the_owner_of_the_server_may_be_rank_0(membership: Membership) -> None:
    rival = Recorder()
    membership.admit(rival, hello(0, "rival"), HELLO)
    assert [message["type"] for message in rival.sent] == ["reject", "closed"]
    assert "both claim rank 0" in rival.sent[0]["message"]
    assert membership.present == {}
    assert membership.failure is not None


def test_same_process_may_try_again_before_the_start(membership: Membership) -> None:
    first, second = Recorder(), Recorder()
    assert membership.admit(first, hello(1, "a"), HELLO) is None
    assert membership.admit(second, hello(1, "a"), HELLO) is first
    assert membership.present == {1: second}
    assert membership.failure is None


def test_running_world_refuses_a_newcomer_and_goes_on(membership: Membership) -> None:
    members = [Recorder(), Recorder()]
    membership.admit(members[0], hello(0, "owner"), HELLO)
    membership.admit(members[1], hello(1, "a"), HELLO)
    assert membership.absent == []
    membership.begin()
    for changes, retry in [({}, False), ({"job": "other"}, True), ({"size": 9}, False)]:
        newcomer = Recorder()
        membership.admit(newcomer, hello(1, "b", **changes), HELLO)
        assert newcomer.sent[0]["type"] == "reject"
        assert newcomer.sent[0]["retry"] is retry
    assert membership.failure is None
    assert [message["type"] for message in members[1].sent] == ["welcome", "start"]


def test_lost_rank_and_all_others_are_told_once(membership: Membership) -> None:
    members = [Recorder(), Recorder()]
    membership.admit(members[0], hello(0, "owner"), HELLO)
    membership.admit(members[1], hello(1, "a"), HELLO)
    membership.begin()
    membership.lose(members[1], "it is silent")
    membership.fail("PeerLostError", "second reason")
    for member in members:
        (told,) = [message for message in member.sent if message["type"] == "failure"]
        assert told["error"] == "PeerLostError"
        assert "Rank 1 (host h, pid 7) is gone: it is silent" in told["message"]
    assert not membership.statuses()[1].alive
