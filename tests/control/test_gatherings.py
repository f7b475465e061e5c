from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfdist.control.frames import Part
from tfdist.control.gatherings import Allocations, Arrival, Gathering, Gatherings


def arrive(gatherings: Gatherings, rank: int, request: int, *, check: str | None = None) -> Gathering:
    arrival = Arrival(request, Part(b"", ""), check)
    return gatherings.join(rank, arrival, key="key", ranks=(0, 1, 2), operation="op")


@given(st.permutations([0] * 4 + [1] * 4 + [2] * 4))
def test_kth_call_meets_kth_calls_in_any_order_of_arrival(order: list[int]) -> None:
    gatherings = Gatherings()
    calls = [0, 0, 0]
    met = []
    for rank in order:
        gathering = arrive(gatherings, rank, calls[rank])
        calls[rank] += 1
        if not gathering.missing:
            gatherings.remove(gathering)
            met.append({arrival.request for arrival in gathering.arrivals.values()})
    assert met == [{0}, {1}, {2}, {3}]
    assert gatherings.unfinished() == []


def test_late_rank_joins_the_failed_gathering_and_lines_up_again() -> None:
    gatherings = Gatherings()
    failed = arrive(gatherings, 0, 0)
    failed.failure = ("CollectiveTimeoutError", "late")
    second = arrive(gatherings, 0, 1)
    assert second is not failed
    assert arrive(gatherings, 1, 0) is failed
    assert arrive(gatherings, 2, 0) is failed
    gatherings.remove(failed)
    assert arrive(gatherings, 1, 1) is second


def test_checks() -> None:
    gatherings = Gatherings()
    arrive(gatherings, 0, 0, check="a")
    assert arrive(gatherings, 1, 0, check="a").checks == {}
    assert arrive(gatherings, 2, 0).checks == {0: "a", 1: "a", 2: "nothing to compare"}


def test_groups_of_the_same_key_are_apart_but_noticed() -> None:
    gatherings = Gatherings()
    ours = arrive(gatherings, 0, 0)
    other = gatherings.join(1, Arrival(0, Part(b"", ""), None), key="key", ranks=(1, 2), operation="op")
    assert other is not ours
    assert gatherings.same_key(ours) == [other]


def test_allocations() -> None:
    allocations = Allocations()
    assert allocations.reserve("a", 3) == 1
    assert allocations.reserve("b", 1) == 4
    assert allocations.reserve("a", 3) == 1
    assert allocations.reserve("c", 1) == 5
    failure = allocations.reserve("a", 2)
    assert isinstance(failure, tuple)
    assert failure[0] == "CollectiveMismatchError"
