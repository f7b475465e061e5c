"""One rank of `tfdist bench comm`: updates weights through a strategy, with no model to compute before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tfdist.bench.ranks import Channel
from tfdist.bench.sent_bytes import bytes_sent

VARIABLES = 12  # equal ones, so that 1, 2, 3 and 4 servers all get the same number of bytes
_WORDS = 4  # bytes of a float32
_LATE = 0.3  # seconds: an acknowledgement may come 0.2 s late


def main(channel: Channel, options: dict[str, Any]) -> None:
    """Answers requests `{"bytes": K, "repeat": n, "count": bool}` with seconds, or bytes sent, of one update.

    Args:
        channel: to the measuring process.
        options: np, and backend: `tf` or `horovod`; the strategy is the environment's.
    """
    import tfdist

    tfdist.init()
    if tfdist.size() != options["np"] or (options["np"] > 1 and tfdist.backend() != options["backend"]):
        raise RuntimeError(f"This is {tfdist.backend()!r} with {tfdist.size()} ranks, not {options}.")
    updates: dict[int, Callable[[], None]] = {}
    channel.ready()
    for request in channel.requests():
        payload = request["bytes"]
        if payload not in updates:
            updates = {payload: _update(payload)}  # the weights before can go
        update = updates[payload]
        update()  # traces, and gathers the ranks
        tfdist.barrier()
        before, start = bytes_sent(), time.perf_counter()
        for _ in range(request["repeat"]):
            update()
        seconds = time.perf_counter() - start
        if request["count"]:
            tfdist.barrier()
            time.sleep(_LATE)
        channel.answer((bytes_sent() - before if request["count"] else seconds) / request["repeat"])


def _update(payload: int) -> Callable[[], None]:
    """One update of so many bytes of weights, done when it returns."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    words = payload // _WORDS // VARIABLES
    weights = [keras.Variable(np.ones(words, "float32")) for _ in range(VARIABLES)]
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    optimizer.build(weights)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def apply() -> Any:
        optimizer.apply([tf.identity(weight.value) for weight in weights], weights)
        return weights[-1].value[0]

    return lambda: apply().numpy()
