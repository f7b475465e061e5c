"""The bytes that docstrings promise, counted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import tensorflow as tf

import tfdist
from tests.worlds import World, on
from tfdist.bench.sent_bytes import bytes_sent

PAYLOAD = 24 * 2**20  # large, so that headers and heartbeats don't count; divisible by 2, 3 and 4 ranks


def idle_bytes_per_second() -> float:
    """What this rank sends while nothing is reduced: Horovod's ranks ask each other for work all the time."""
    before, started = bytes_sent(), time.monotonic()
    time.sleep(1.0)
    return (bytes_sent() - before) / (time.monotonic() - started)


def bytes_of(kind: str) -> float:
    """Bytes this rank sends for one collective of `PAYLOAD` bytes."""
    x = tf.ones([PAYLOAD // 4])
    calls: dict[str, Any] = {
        "allreduce": lambda: tfdist.allreduce(x, op=tfdist.Sum),
        "reducescatter": lambda: tfdist.reducescatter(x, op=tfdist.Sum),
        "allgather": lambda: tfdist.allgather(x),
    }
    call = calls[kind]
    call()
    tfdist.barrier()
    idle = idle_bytes_per_second()
    before, started = bytes_sent(), time.monotonic()
    tfdist.barrier()
    call()
    tfdist.barrier()
    time.sleep(0.3)  # an acknowledgement may come 0.2 s late
    return bytes_sent() - before - idle * (time.monotonic() - started)


@on(("tf", 2), ("tf", 3), ("tf", 4))
def test_ring_allreduce_moves_2_n_minus_1_over_n(world: World) -> None:
    expected = 2 * (world.size - 1) / world.size * PAYLOAD
    assert world.call(bytes_of, "allreduce") == [pytest.approx(expected, rel=0.03)] * world.size


@on(("tf", 2), ("tf", 4))
@pytest.mark.parametrize("kind", ["reducescatter", "allgather"])
def test_bytes(world: World, kind: str) -> None:
    size = world.size
    expected = {"reducescatter": (size - 1) / size, "allgather": size - 1.0}[kind] * PAYLOAD
    # An all-gather is padded to a size class, by at most an eighth.
    for sent in world.call(bytes_of, kind):
        assert expected * 0.98 <= sent <= expected * (1.15 if kind == "allgather" else 1.03)


@on(("horovod", 2), ("horovod", 4))
def test_horovod_allreduce(world: World) -> None:
    expected = 2 * (world.size - 1) / world.size * PAYLOAD
    assert world.call(bytes_of, "allreduce") == [pytest.approx(expected, rel=0.05)] * world.size
