from __future__ import annotations

import time

import pytest

from tests.control.worlds import in_threads, is_failed, open_world, wait_for
from tfdist.control import ControlPlane
from tfdist.errors import CollectiveMismatchError


def test_allocate_is_equal_on_all_ranks_whatever_the_order(rendezvous: str) -> None:
    keys = [f"key {number}" for number in range(50)]
    with open_world(4, rendezvous) as planes:

        def ask(plane: ControlPlane) -> dict[str, int]:
            rotated = keys[plane.spec.rank * 7 :] + keys[: plane.spec.rank * 7]
            return {key: plane.allocate(key, 1 + len(key) % 3) for key in rotated}

        answers = in_threads([lambda plane=plane: ask(plane) for plane in planes])
    assert answers[1:] == answers[:-1]
    reserved = [first + place for key, first in answers[0].items() for place in range(1 + len(key) % 3)]
    assert sorted(reserved) == list(range(1, len(reserved) + 1))


def test_allocate_never_waits_for_peers_and_remembers(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        assert planes[1].allocate("a", 2) == 1
        assert planes[1].allocate("b") == 3
        assert planes[1].allocate("a", 2) == 1
        assert planes[0].allocate("b") == 3


def test_allocate_rules(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        planes[0].allocate("a", 2)
        with pytest.raises(CollectiveMismatchError, match="asks for 3 integers, another asked for 2"):
            planes[1].allocate("a", 3)
        with pytest.raises(ValueError, match="at least 1"):
            planes[1].allocate("b", 0)
        assert planes[1].allocate("a", 2) == 1


def settle(planes: list[ControlPlane]) -> None:
    """Waits until the server has dealt with what all ranks sent so far: it handles each in order."""
    for plane in planes:
        plane.status()


def test_equal_announcements_in_another_order_are_fine(rendezvous: str) -> None:
    with open_world(2, rendezvous, grace=0.3) as planes:
        for signature in ("a", "b", "a"):
            planes[0].announce("key", signature)
        for signature in ("b", "a"):
            planes[1].announce("key", signature)
        planes[0].announce("key", {"more": 1})
        settle(planes)
        time.sleep(0.8)
        settle(planes)
        assert [plane.failure for plane in planes] == [None, None]


def test_different_announcements_fail_all_ranks_after_the_grace(rendezvous: str) -> None:
    with open_world(3, rendezvous, grace=0.5) as planes:
        seen: list[Exception] = []
        planes[2].on_failure(seen.append)
        begin = time.monotonic()
        planes[0].announce("grads of model", "float32 [2]")
        planes[1].announce("grads of model", "float32 [3]")
        for plane in planes:
            wait_for(is_failed(plane, CollectiveMismatchError))
            text = str(plane.failure)
            assert "grads of model" in text
            assert "rank 0 sent float32 [2]; rank 1 sent float32 [3]" in text
            for call in (plane.exchange, plane.announce):
                with pytest.raises(CollectiveMismatchError):
                    call("key", None)
        assert time.monotonic() - begin >= 0.5
        assert seen == [planes[2].failure]


def test_conflict_settled_within_the_grace_is_forgotten(rendezvous: str) -> None:
    with open_world(2, rendezvous, grace=0.6) as planes:
        planes[0].announce("key", "a")
        planes[1].announce("key", "b")
        settle(planes)
        planes[0].announce("key", "b")
        planes[1].announce("key", "a")
        time.sleep(1)
        settle(planes)
        assert planes[0].failure is None
