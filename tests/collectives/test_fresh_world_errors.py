"""Ranks that come late, differ at run time, or die: the world ends, within the bound, with names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.collectives import bodies
from tests.worlds import World

BACKENDS = ["tf", "horovod"]


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("tf", "graph"),
        ("horovod", "eager"),
        pytest.param("tf", "eager", marks=pytest.mark.thorough),
        pytest.param("horovod", "graph", marks=pytest.mark.thorough),
    ],
)
def test_absent_rank_is_named(fresh_world: Callable[..., World], backend: str, mode: str) -> None:
    world = fresh_world(backend, 2, timeout=6.0)
    present, absent = world.call(bodies.absent, 1, mode, timeout=60.0)
    assert absent == "absent"
    assert present.startswith("CollectiveTimeoutError"), present
    assert "rank 1" in present


def test_late_rank_is_named_and_the_next_collective_works(fresh_world: Callable[..., World]) -> None:
    world = fresh_world("tf", 2, timeout=5.0)
    for message, total in world.call(bodies.late, 1, 8.0, timeout=60.0):
        assert message.startswith("CollectiveTimeoutError"), message
        assert "rank 1 did not arrive at \"allreduce 'metric'\"" in message
        assert total == 2.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_rank_is_named(fresh_world: Callable[..., World], backend: str, mode: str) -> None:
    world = fresh_world(backend, 2, timeout=20.0)
    outcomes = world.outcomes(bodies.dies, 1, mode, timeout=60.0)
    assert outcomes[1].kind == "Died"
    assert outcomes[0].error is None, outcomes[0].traceback
    assert len(outcomes[0].value) == 3
    for message in outcomes[0].value:
        assert message.startswith("PeerLostError"), message
        assert "rank 1" in message.lower(), message


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_differ_in_a_function(fresh_world: Callable[..., World], backend: str) -> None:
    world = fresh_world(backend, 2, timeout=20.0)
    for message in world.call(bodies.static_shape_mismatch, timeout=60.0):
        assert message.startswith("CollectiveMismatchError"), message


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_differ_only_at_run_time(fresh_world: Callable[..., World], backend: str) -> None:
    world = fresh_world(backend, 2, timeout=20.0)
    for message in world.call(bodies.dynamic_shape_mismatch, timeout=60.0):
        assert message.startswith("CollectiveMismatchError"), message
