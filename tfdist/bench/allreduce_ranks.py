"""One rank of `tfdist bench allreduce` and `latency`: all-reduces float32 tensors, eagerly or in a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tfdist.bench import peers
from tfdist.bench.ranks import Channel

_WORDS = 4  # bytes of a float32


def main(channel: Channel, options: dict[str, Any]) -> None:
    """Answers requests `{"bytes": K, "repeat": n, "mode": "graph"|"eager"}` with seconds per all-reduce.

    Args:
        channel: to the measuring process.
        options: np, and backend: `tf` or `horovod` through tfdist, or `raw` for Horovod's own functions.
    """
    allreduce = _raw_horovod(channel, options) if options["backend"] == "raw" else _tfdist(options)
    import tensorflow as tf

    size = options["np"]
    graphs: dict[int, Callable[[Any], Any]] = {}

    def graph(number: int) -> Callable[[Any], Any]:
        if number not in graphs:
            graphs[number] = tf.function(lambda value: allreduce(value, f"graph.{number}"))
        return graphs[number]

    def eager(value: Any) -> Any:
        return allreduce(value, "eager")

    channel.ready()
    for request in channel.requests():
        value = tf.fill([request["bytes"] // _WORDS], float(channel.rank + 1))
        run = graph(request["bytes"]) if request["mode"] == "graph" else eager
        total = run(value)  # traces, and gathers the ranks
        if float(total[0]) != size * (size + 1) / 2:
            raise RuntimeError(f"The sum of 1 to {size} came out as {float(total[0])}.")
        start = time.perf_counter()
        for _ in range(request["repeat"]):
            total = None  # so that its memory is free for the next one
            total = run(value)
        total[0].numpy()
        channel.answer((time.perf_counter() - start) / request["repeat"])
        del value, total


def _tfdist(options: dict[str, Any]) -> Callable[[Any, str], Any]:
    import tfdist

    if options.get("unsplit"):
        from tfdist.collectives import tf_collectives

        tf_collectives.PARTS_IN_FLIGHT = -1
    tfdist.init()
    if (tfdist.backend(), tfdist.size()) != (options["backend"], options["np"]):
        raise RuntimeError(f"This is {tfdist.backend()!r} with {tfdist.size()} ranks, not {options}.")
    if options.get("mpi") and not tfdist.mpi_enabled():
        raise RuntimeError("Horovod runs without MPI.")
    return lambda value, name: tfdist.allreduce(value, op=tfdist.Sum, name=name)


def _raw_horovod(channel: Channel, options: dict[str, Any]) -> Callable[[Any, str], Any]:
    hvd = peers.start_horovod(channel, size=options["np"])
    return lambda value, name: hvd.allreduce(value, op=hvd.Sum, name=name)
