"""`DesyncCheckCallback` finds one changed bit; `default` holds what it says."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.distributed import fitting
from tests.worlds import World, on
from tfdist.callbacks import DesyncCheckCallback
from tfdist.callbacks.desync_check import _sums


def drift(what: str) -> str:
    """The last rank changes one thing after the third of five steps; checks come after every third."""

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch != 2 or what == "nothing" or tfdist.rank() != tfdist.size() - 1:
                return
            optimizer = self.model.optimizer
            variable = {
                "weight": self.model.weights[-1],
                "slot": optimizer.variables[2],
                "iterations": optimizer.iterations,
            }[what]
            value = np.array(variable)
            variable.assign(np.nextafter(value, 1) if value.dtype.kind == "f" else value + 1)

    trained = fitting.model()
    data = fitting.dataset(fitting.batches("equal", tfdist.size()), length=True)
    try:
        trained.fit(data, epochs=2, verbose=0, callbacks=[Change(), DesyncCheckCallback(3)])
    except tfdist.OutOfSyncError as error:
        return str(error)
    return tfdist.check_in_sync(trained)


@on(("tf", 2), ("horovod", 2))
@pytest.mark.parametrize("what", ["weight", "slot", "iterations"])
def test_one_changed_bit_is_found_on_all_ranks(world: World, what: str) -> None:
    for said in world.call(drift, what):
        assert "after 3 steps" in said, said
        assert "on rank 1 (compared with rank 0)" in said
        path = {"weight": "bias", "slot": "kernel", "iterations": "iteration"}[what]
        assert path in said.partition(", first ")[2].partition(" on rank")[0]


@on(("tf", 2), ("horovod", 2))
def test_equal_ranks_pass(world: World) -> None:
    fingerprints = world.call(drift, "nothing")
    assert len(fingerprints[0]) == 32
    assert len(set(fingerprints)) == 1


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool"]
)
def test_sums_see_every_bit_and_the_order(dtype: str) -> None:
    import tensorflow as tf

    values = tf.cast(tf.constant([1, 0, 1, 0, 0, 1]), dtype)
    swapped = tf.gather(values, [1, 0, 2, 3, 4, 5])
    changed = tf.concat([values[:-1], tf.cast([0], dtype)], 0)
    sums = [tuple(_sums(each).numpy()) for each in (values, swapped, changed)]
    assert len(set(sums)) == 3
    assert sums[0] == tuple(_sums(tf.identity(values)).numpy())


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_what_is_no_number_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="every_n_steps"):
        DesyncCheckCallback(steps)


def test_default_callbacks() -> None:
    def names(**options: Any) -> list[str]:
        return [type(callback).__name__ for callback in tfdist.callbacks.default(**options)]

    assert names() == ["BroadcastGlobalVariablesCallback", "DesyncCheckCallback"]
    assert names(check_every=0, best="best.keras") == [
        "BroadcastGlobalVariablesCallback",
        "BestModelCheckpoint",
    ]
    assert names(check_every=0, initial_lr=0.1, warmup_epochs=2)[-1] == "LearningRateWarmupCallback"
    with pytest.raises(ValueError, match="initial_lr"):
        tfdist.callbacks.default(warmup_epochs=3)
