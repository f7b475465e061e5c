"""`tfdist.run` in real worlds: what a notebook does with it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import tfdist
from tests.conftest import require
from tests.distributed import models

BACKENDS = ("tf", "horovod")
TIMEOUT = 60.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_closure_trains_and_returns_in_rank_order(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    require(backend)
    x, y = models.data("dense")
    offset = 100.0

    def train(scale: float, *, epochs: int) -> dict[str, Any]:
        import keras
        import tensorflow as tf

        model = models.dense()
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        tfdist.broadcast_variables(model.variables, root_rank=0)
        model.fit(tfdist.shard((x, y), batch_size=8), epochs=epochs, verbose=0)
        print("hello from", tfdist.rank())
        own = tf.constant(offset + scale * tfdist.rank())
        return {
            "rank": tfdist.rank(),
            "backend": tfdist.backend(),
            "sum": float(tfdist.allreduce(own, op=tfdist.Sum)),
            "steps": int(model.optimizer.iterations),
            "weights": model.get_weights(),
            "pid": os.getpid(),
        }

    first, second = tfdist.run(train, (10.0,), {"epochs": 2}, np=2, backend=backend, timeout=TIMEOUT)
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["backend"] == second["backend"] == backend
    assert first["sum"] == second["sum"] == 210.0
    assert first["steps"] == second["steps"] == 2 * len(x) // 16
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    for here, there in zip(first["weights"], second["weights"], strict=True):
        assert np.array_equal(here, there)
    assert not tfdist.is_initialized()
    printed = [line for line in capsys.readouterr().out.splitlines() if "hello" in line]
    assert sorted(printed) == ["[0] hello from 0", "[1] hello from 1"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_exception_of_rank_1_is_raised_here(backend: str) -> None:
    require(backend)

    def fails_on_rank_1() -> float:
        import tensorflow as tf

        if tfdist.rank() == 1:
            raise ZeroDivisionError("rank 1 divided")
        return float(tfdist.allreduce(tf.constant(1.0)))  # waits for rank 1

    with pytest.raises(ZeroDivisionError, match="rank 1 divided") as caught:
        tfdist.run(fails_on_rank_1, np=2, backend=backend, timeout=TIMEOUT)
    cause = caught.value.__cause__
    assert "on rank 1" in str(cause)
    assert "in fails_on_rank_1" in str(cause)
