"""Errors in shared worlds, after which the world must still work."""

from __future__ import annotations

import pytest

from tests.collectives import bodies
from tests.worlds import World, on

LARGE = (("tf", 2), ("tf", 4), ("horovod", 2))


@on(*LARGE)
@pytest.mark.parametrize(
    ("what", "sent"),
    [
        ("shape", ["float32[3]", "float32[4]"]),
        ("dtype", ["float32[3]", "float64[3]"]),
        ("op", ["Sum", "Max"]),
        ("root", ["root 0", "root 1"]),
        ("kind", ["allreduce", "allgather"]),
        ("axes", ["[3]", "[2]"]),
        ("number", ["float32[3]", "float32[3], float32[3]"]),
        ("process set", ["[1]", "[0]"]),
    ],
)
def test_mismatch_says_who_sent_what(world: World, what: str, sent: list[str]) -> None:
    for message in world.call(bodies.mismatch, what):
        assert f"rank {world.size - 1}" in message
        assert all(text in message for text in sent), message


@on(("tf", 4), ("horovod", 4))
def test_process_sets(world: World) -> None:
    for rank, results in enumerate(world.call(bodies.process_sets)):
        members = [rank % 2, rank % 2 + 2]
        first, second = results["ids"]  # other tests of this world may have added some
        assert second == first + 1
        assert results["place"] == rank // 2
        assert results["outside"] == -1
        assert results["sum"] == sum(members)
        assert results["gather"].tolist() == [member for member in members for _ in range(member + 1)]
        assert results["broadcast"] == members[-1]
        assert results["graph"] == sum(members) / 2
        assert f"rank {rank}" in results["error"]
        assert results["all"] == 4.0
        assert "exists already" in results["twice"]
        assert results["removed"] == (True, True, None)


@on(("tf", 2), ("tf", 4))
def test_one_traced_function_several_times(world: World) -> None:
    assert all(world.call(bodies.same_function_twice, 30))


@on(*LARGE)
def test_xla_is_refused(world: World) -> None:
    for rank, message in enumerate(world.call(bodies.compiled_by_xla)):
        assert "jit_compile" in message
        assert f"rank {rank}" in message
