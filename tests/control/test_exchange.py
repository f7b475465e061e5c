from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from tests.control.worlds import connect, in_threads, open_world, play, wait_for
from tfdist.control import ControlPlane
from tfdist.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    NotInitializedError,
    PeerLostError,
)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_payloads_in_rank_order(size: int, rendezvous: str) -> None:
    def body(plane: ControlPlane) -> list[Any]:
        return [plane.exchange("key", said(plane.spec.rank, turn)) for turn in range(3)]

    def said(rank: int, turn: int) -> dict[str, Any]:
        return {"rank": rank, "turn": turn, "raw": bytes([rank])}

    expected = [[said(rank, turn) for rank in range(size)] for turn in range(3)]
    assert play(size, rendezvous, body) == [expected] * size


def test_groups(rendezvous: str) -> None:
    def body(plane: ControlPlane) -> list[Any]:
        rank = plane.spec.rank
        group = [0, 2] if rank in (0, 2) else [1, 3]
        return plane.exchange("key", rank, ranks=group)

    assert play(4, rendezvous, body) == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("group", [[], [1], [1, 0], [0, 0], [0, 5], [-1, 0]])
def test_group_rule(group: list[int], rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes, pytest.raises(ValueError, match="ascending"):
        planes[0].exchange("key", None, ranks=group)


def test_large_payload(rendezvous: str) -> None:
    data = random.Random(0).randbytes(20 << 20)

    def body(plane: ControlPlane) -> bool:
        received = plane.exchange("key", {"data": data if plane.spec.rank else None})
        return received == [{"data": None}, {"data": data}, {"data": data}]

    assert play(3, rendezvous, body) == [True] * 3


def test_small_exchanges_pass_a_large_one(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        large = threading.Thread(target=planes[1].exchange, args=("large", bytes(100 << 20)), daemon=True)
        large.start()
        for turn in range(20):
            calls = [lambda plane=plane: plane.exchange("small", turn) for plane in planes]  # noqa: B023
            assert in_threads(calls) == [[turn] * 2] * 2
        planes[0].exchange("large", None)
        large.join(10)
        assert not large.is_alive()


def test_stress_many_threads_and_keys(rendezvous: str) -> None:
    """Each thread of each rank walks its keys in an order of its own; the k-th calls must meet."""
    size, threads, turns = 4, 4, 60

    def body(plane: ControlPlane) -> list[Any]:
        def walk(thread: int) -> list[str]:
            schedule = random.Random(thread)  # same on all ranks
            pauses = random.Random(plane.spec.rank * 100 + thread)
            wrong = []
            calls: dict[str, int] = {}
            for _ in range(turns):
                key = f"{thread}/{schedule.randrange(3)}"
                group = sorted(schedule.sample(range(size), schedule.randrange(2, size + 1)))
                if plane.spec.rank not in group:
                    continue
                if pauses.random() < 0.1:
                    time.sleep(pauses.random() / 50)
                place = f"{key} {group}"
                calls[place] = calls.get(place, 0) + 1
                said = [calls[place], place]
                met = plane.exchange(key, [plane.spec.rank, *said], ranks=group, check=key)
                if met != [[rank, *said] for rank in group]:
                    wrong.append(f"{key} {group}: {met}")
            return wrong

        return in_threads([lambda thread=thread: walk(thread) for thread in range(threads)])

    assert play(size, rendezvous, body, timeout=20) == [[[]] * threads] * size


# Check values.


def test_mismatch_is_told_to_every_rank_and_is_not_fatal(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:

        def call(plane: ControlPlane) -> Any:
            what = "float32 [3]" if plane.spec.rank == 1 else "float32 [2]"
            return plane.exchange("key", None, check=what, describe="allreduce 'grads'")

        for outcome in in_threads([lambda plane=plane: call(plane) for plane in planes]):
            assert isinstance(outcome, CollectiveMismatchError)
            assert "allreduce 'grads'" in str(outcome)
            assert "ranks 0, 2 sent float32 [2]; rank 1 sent float32 [3]" in str(outcome)
        assert all(plane.failure is None for plane in planes)
        again = [lambda plane=plane: plane.exchange("key", plane.spec.rank, check="x") for plane in planes]
        assert in_threads(again) == [[0, 1, 2]] * 3


def test_mismatch_does_not_wait_long_for_the_rest(rendezvous: str) -> None:
    with open_world(3, rendezvous, grace=0.3) as planes:
        outcomes = in_threads(
            [lambda plane=plane: plane.exchange("key", None, check=plane.spec.rank) for plane in planes[:2]]
        )
        assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 2
        assert "rank 2 had not arrived yet" in str(outcomes[0])
        with pytest.raises(CollectiveMismatchError):
            planes[2].exchange("key", None, check=0)


def test_check_may_be_any_json_value(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        same = [{"a": 1, "b": [2]}, {"b": [2], "a": 1}]
        calls = [lambda rank=rank: planes[rank].exchange("key", 0, check=same[rank]) for rank in (0, 1)]
        assert in_threads(calls) == [[0, 0]] * 2


# Timeouts.


def test_timeout_names_the_missing_rank_and_what_it_does(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes, planes[1].section("evaluate"):
        outcomes = in_threads(
            [lambda rank=rank: planes[rank].exchange("key", None, timeout=1) for rank in (0, 2)]
        )
        for outcome in outcomes:
            assert isinstance(outcome, CollectiveTimeoutError)
            text = str(outcome)
            assert "rank 1 did not arrive at \"exchange 'key'\" within 1 s; 2 of 3" in text
            assert "it entered 'evaluate'" in text
            assert f"pid {planes[1].status()[1].pid}" in text
            assert "init(timeout=...)" in text


def test_late_rank_gets_the_error_too_and_later_calls_meet(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        with pytest.raises(CollectiveTimeoutError):
            planes[0].exchange("key", 0, timeout=0.2)
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not arrive"):
            planes[1].exchange("key", 1)
        assert time.monotonic() - begin < 5
        assert in_threads([lambda plane=plane: plane.exchange("key", 2) for plane in planes]) == [[2, 2]] * 2


def test_shortest_bound_ends_the_wait_of_all(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        outcomes = in_threads(
            [
                lambda: planes[0].exchange("key", 0, timeout=25),
                lambda: planes[1].exchange("key", 0, timeout=0.3),
            ]
        )
        assert [type(outcome) for outcome in outcomes] == [CollectiveTimeoutError] * 2


def test_different_groups_under_one_key_are_hinted_at(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        outcomes = in_threads(
            [
                lambda: planes[0].exchange("key", 0, ranks=[0, 1], timeout=0.5),
                lambda: planes[1].exchange("key", 0, timeout=2),
            ]
        )
        assert "rank 1 waits under the same key, but for ranks 0, 1, 2" in str(outcomes[0])
        assert isinstance(outcomes[1], CollectiveTimeoutError)


@pytest.mark.parametrize("timeout", [0, -1, float("inf")])
def test_wait_without_bound_is_refused(timeout: float, rendezvous: str) -> None:
    with open_world(1, rendezvous) as planes, pytest.raises(ValueError, match="bound"):
        planes[0].exchange("key", None, timeout=timeout)


def test_payload_that_cannot_be_sent_breaks_nothing(rendezvous: str) -> None:
    with open_world(1, rendezvous) as planes:
        with pytest.raises(TypeError):
            planes[0].exchange("key", object())
        with pytest.raises(ValueError, match="digest"):
            planes[0].exchange("key", None, check="x" * (17 << 20))
        assert planes[0].exchange("key", 1) == [1]


# Goodbye.


def test_departed_rank_ends_the_wait_at_once_without_failing_the_world(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        leaver = threading.Timer(0.3, planes[2].close)
        leaver.start()
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 2 already left"):
            planes[0].exchange("key", None)
        with pytest.raises(PeerLostError, match="rank 2 already left"):
            planes[1].exchange("other", None)
        assert time.monotonic() - begin < 5
        leaver.join()
        assert in_threads([lambda p=p: p.exchange("k", 1, ranks=[0, 1]) for p in planes[:2]]) == [[1, 1]] * 2
        assert planes[0].failure is None
        assert [status.alive for status in planes[0].status()] == [True, True, False]


def test_rank_0_serves_on_until_the_others_left(rendezvous: str) -> None:
    with open_world(3, rendezvous) as planes:
        closing = threading.Thread(target=planes[0].close, daemon=True)
        closing.start()
        time.sleep(0.5)
        assert in_threads([lambda p=p: p.exchange("k", 1, ranks=[1, 2]) for p in planes[1:]]) == [[1, 1]] * 2
        assert closing.is_alive()
        in_threads([plane.close for plane in planes[1:]])
        closing.join(1)
        assert not closing.is_alive()


def test_rank_0_does_not_wait_for_ever_and_its_end_is_no_failure(rendezvous: str) -> None:
    with open_world(2, rendezvous) as planes:
        begin = time.monotonic()
        planes[0].close()
        assert 2 < time.monotonic() - begin < 5
        time.sleep(0.2)
        assert planes[1].failure is None
        with pytest.raises(PeerLostError, match="Rank 0 has left"):
            planes[1].exchange("key", None)
        begin = time.monotonic()
        planes[1].close()
        assert time.monotonic() - begin < 1


def test_close_ends_waiting_threads_and_is_idempotent(rendezvous: str) -> None:
    plane, other = in_threads([lambda: connect(0, 2, rendezvous), lambda: connect(1, 2, rendezvous)])
    outcome: list[Any] = []

    def wait() -> None:
        try:
            other.exchange("key", None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: other.status()[1].inside)
    other.close()
    other.close()
    thread.join(5)
    assert isinstance(outcome[0], NotInitializedError)
    with pytest.raises(NotInitializedError):
        other.exchange("key", None)
    with pytest.raises(NotInitializedError):
        other.announce("key", "x")
    plane.close()
