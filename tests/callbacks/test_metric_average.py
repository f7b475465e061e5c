"""`MetricAverageCallback`: weights by samples, train and validation apart, seen by later callbacks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.played_ranks import as_rank
from tests.worlds import World, on
from tfdist.callbacks import MetricAverageCallback


def compiled() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    return model


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rows).normal(size=(rows, 2)).astype("float32")
    return x, x[:, :1] * rows


def peer_of(said_by_peer: dict[str, Any]) -> Any:
    return lambda rank, said: said if rank == 0 else said_by_peer


class Seen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs = dict(logs)


def test_equals_one_process_on_all_rows_though_parts_differ() -> None:
    """Rank 1 of 2 trains and validates on other amounts of data; the rate is 0, so weights do not matter."""
    train, validation = (data(10), data(7)), (data(5), data(20))
    said: list[dict[str, Any]] = []

    def listen(rank: int, what: Any) -> Any:
        said.append(what)
        return what

    with as_rank(1, 2, listen):
        compiled().fit(
            *train[1],
            batch_size=4,
            validation_data=validation[1],
            callbacks=[MetricAverageCallback()],
            verbose=0,
        )
    seen = Seen()
    with as_rank(0, 2, peer_of(said[0])):
        history = compiled().fit(
            *train[0],
            batch_size=4,
            validation_data=validation[0],
            callbacks=[MetricAverageCallback(), seen],
            verbose=0,
        )
    whole = compiled().fit(
        *map(np.concatenate, zip(*train, strict=True)),
        batch_size=8,
        validation_data=tuple(map(np.concatenate, zip(*validation, strict=True))),
        verbose=0,
    )
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in whole.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
        assert seen.logs[name] == history.history[name][0]


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [((1.0, 10), (4.0, 20), 3.0), ((1.0, 10), (float("nan"), 0), 1.0), ((1.0, 0), (4.0, 0), 2.5)],
)
def test_a_rank_without_samples_does_not_count(mine: Any, theirs: Any, expected: float) -> None:
    peer = {"train": theirs[1], "validation": 0.0, "values": {"loss": theirs[0]}}
    callback = MetricAverageCallback()
    callback.set_model(compiled())
    callback._train_samples = mine[1]
    logs = {"loss": mine[0]}
    with as_rank(0, 2, peer_of(peer)):
        callback.on_epoch_end(0, logs)
    assert logs["loss"] == pytest.approx(expected)


def test_leaves_alone_what_only_one_rank_has_and_what_is_equal() -> None:
    peer = {"train": 7, "validation": 0.0, "values": {"lr": 0.1, "theirs": 1.0}}
    callback = MetricAverageCallback()
    callback.set_model(compiled())
    callback._train_samples = 3
    logs = {"lr": 0.1, "mine": 5.0, "note": "text"}
    with as_rank(0, 2, peer_of(peer)):
        callback.on_epoch_end(0, logs)
    assert logs == {"lr": 0.1, "mine": 5.0, "note": "text"}


def test_alone_it_does_nothing() -> None:
    with as_rank(0, 1):
        averaged = compiled().fit(*data(9), callbacks=[MetricAverageCallback()], verbose=0)
    assert averaged.history == compiled().fit(*data(9), verbose=0).history


def shared_history() -> dict[str, list[float]]:
    import tfdist

    model = compiled()
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", metrics=["mae"])
    average = tfdist.callbacks.MetricAverageCallback()
    history = model.fit(
        tfdist.shard(data(24), batch_size=8 // tfdist.size(), seed=1),
        validation_data=tfdist.shard(data(13), batch_size=4, shuffle=False),
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[average],
    )
    return dict(history.history)


@on(("tf", 2))
def test_history_of_all_ranks_is_that_of_one_process(world: World) -> None:
    import tfdist

    first, second = world.call(shared_history)
    assert first == second
    tfdist.init()
    try:
        alone = shared_history()
    finally:
        tfdist.shutdown()
    for name, values in alone.items():
        np.testing.assert_allclose(first[name], values, rtol=1e-5, err_msg=name)
