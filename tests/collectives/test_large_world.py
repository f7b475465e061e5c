"""More than ten ranks: TensorFlow sorts tasks as text, so that 10 would come before 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.collectives import bodies
from tests.worlds import World
from tfdist.collectives.tf_server import first_task


@pytest.mark.parametrize("size", [1, 2, 10, 11, 90, 91, 900, 901, 5000])
def test_tasks_sort_alike_as_text_and_as_numbers(size: int) -> None:
    tasks = range(first_task(size), first_task(size) + size)
    assert sorted(tasks, key=str) == list(tasks)


def test_results_come_in_the_order_of_ranks(fresh_world: Callable[..., World]) -> None:
    size = 11
    world = fresh_world("tf", size, timeout=200.0)
    for rank, results in enumerate(world.call(bodies.results_by_rank, timeout=200.0)):
        assert results["gather"] == [other for other in range(size) for _ in range(other % 3 + 1)]
        assert results["alltoall"] == [100 * other + rank for other in range(size)]
        assert results["scatter"] == [rank]
        assert results.get("some") == ([1, 2, 9, 10] if rank in (1, 2, 9, 10) else None)
