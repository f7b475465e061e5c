"""Models on paper: the formulas, and where they must agree. `tests.strategies` counts real bytes."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist import cost

LINK = cost.Link(latency=1e-5, bandwidth=1e9)
ranks = st.integers(1, 1024)
payloads = st.floats(0.0, 1e12)


def test_examples() -> None:
    assert doctest.testmod(cost).failed == 0


@given(ranks, payloads)
def test_as_many_servers_as_ranks_move_what_a_ring_moves(size: int, payload: float) -> None:
    one, other = cost.parameter_server(size, payload, LINK, servers=size), cost.ring(size, payload, LINK)
    assert one.sent == pytest.approx(other.sent)
    assert one.seconds == pytest.approx(other.seconds), "the same bytes in as many messages"


@given(ranks, payloads)
def test_one_server_is_the_literatures(size: int, payload: float) -> None:
    traffic = cost.parameter_server(size, payload, LINK)
    assert traffic.sent + traffic.received == pytest.approx(2 * (size - 1) * payload)


@given(st.data(), st.integers(2, 1024), st.floats(1.0, 1e12))
def test_more_servers_never_cost_more(data: st.DataObject, size: int, payload: float) -> None:
    few = data.draw(st.integers(1, size - 1))
    less = cost.parameter_server(size, payload, LINK, servers=few)
    more = cost.parameter_server(size, payload, LINK, servers=few + 1)
    assert more.sent <= less.sent * (1 + 1e-9)
    assert more.seconds <= less.seconds


@given(st.data(), ranks, payloads)
def test_who_shares_a_link_waits_for_all_bytes(data: st.DataObject, size: int, payload: float) -> None:
    link = cost.Link(latency=0.0, bandwidth=1e9, shared=True)
    servers = data.draw(st.integers(1, size))
    everything = pytest.approx(2 * (size - 1) * payload / 1e9)
    assert cost.ring(size, payload, link).seconds == everything
    assert cost.parameter_server(size, payload, link, servers=servers).seconds == everything


def test_one_rank_sends_nothing() -> None:
    assert cost.ring(1, 1e6, LINK) == cost.parameter_server(1, 1e6, LINK) == cost.Traffic(0.0, 0.0, 0.0)


def test_slots_are_divided() -> None:
    server, worker = cost.parameter_server_memory(4, 100.0, servers=2)
    assert server == cost.Memory(weights=100.0, gradients=250.0, slots=100.0)
    assert worker.total == 200.0
    assert cost.ring_memory(100.0).total == 400.0


@pytest.mark.parametrize(
    ("size", "servers", "payload"), [(0, 1, 1.0), (2, 3, 1.0), (2, 0, 1.0), (2, 1, -1.0)]
)
def test_what_makes_no_sense_is_refused(size: int, servers: int, payload: float) -> None:
    with pytest.raises(ValueError, match="1 <= servers <= ranks"):
        cost.parameter_server(size, payload, LINK, servers=servers)


def test_a_link_must_move_something() -> None:
    with pytest.raises(ValueError, match="bandwidth above 0"):
        cost.Link(0.0, 0.0)
