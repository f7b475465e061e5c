"""`MetricAverageCallback`: exact in a loop of one's own; in `fit()` logs are global before it sees them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfdist
from tests.distributed import bodies
from tests.played_ranks import as_rank
from tests.worlds import World, on
from tfdist.callbacks import MetricAverageCallback


def compiled(optimizer: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.0), "mse", metrics=["mae", keras.metrics.R2Score()])
    return model


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rows).normal(size=(rows, 2)).astype("float32")
    return x, x[:, :1] * rows


def averaging(model: Any) -> Any:
    callback = MetricAverageCallback()
    callback.set_model(model)
    return callback


def test_a_loop_of_ones_own_gets_what_one_process_measures() -> None:
    """Rank 1 of 2 measures another amount of data."""
    parts, said = (data(10), data(25)), []

    def listen(rank: int, what: Any) -> Any:
        said.append(what)
        return what

    model = compiled()
    with as_rank(1, 2, listen):
        averaging(model).on_epoch_end(
            0, {**model.evaluate(*parts[1], verbose=0, return_dict=True), "rate": 0.5}
        )
    theirs = said[0]
    logs = {
        **model.evaluate(*parts[0], verbose=0, return_dict=True),
        "rate": 0.1,
        "mine": 1.0,
        "note": "text",
    }
    with as_rank(0, 2, lambda rank, mine: theirs if rank else mine):
        averaging(model).on_epoch_end(0, logs)
    whole = map(np.concatenate, zip(*parts, strict=True))
    expected = model.evaluate(*whole, verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(logs["rate"], (10 * 0.1 + 25 * 0.5) / 35)
    assert (logs["mine"], logs["note"]) == (1.0, "text"), "what one rank alone has stays"


def test_alone_it_does_nothing() -> None:
    with as_rank(0, 1):
        averaged = compiled().fit(*data(9), callbacks=[MetricAverageCallback()], verbose=0)
    assert averaged.history == compiled().fit(*data(9), verbose=0).history


class Seen(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def history_and_own_loop() -> dict[str, Any]:
    """What callbacks before and after it read in `fit()`, and what it makes of an evaluation of one's own."""
    model = compiled(bodies.wrap(keras.optimizers.SGD(0.05)))
    before, after, average = Seen(), Seen(), MetricAverageCallback()
    history = model.fit(
        tfdist.shard(data(24), batch_size=8 // tfdist.size(), seed=1),
        validation_data=tfdist.shard(data(13), batch_size=4, shuffle=False),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[before, average, after],
    ).history
    epochs = [{name: values[epoch] for name, values in history.items()} for epoch in range(2)]
    assert before.logs == after.logs == epochs
    x, y = (values[tfdist.rank() :: tfdist.size()] for values in data(13))
    logs = model.evaluate(x, y, verbose=0, return_dict=True)
    average.on_epoch_end(0, logs)
    return {"history": history, "own loop": logs}


@on(("tf", 2))
def test_all_ranks_read_what_one_process_does(world: World) -> None:
    first, second = world.call(history_and_own_loop)
    assert first == second
    tfdist.init()
    try:
        alone = history_and_own_loop()
    finally:
        tfdist.shutdown()
    for part, values in alone.items():
        assert set(first[part]) == set(values)
        for name, value in values.items():
            np.testing.assert_allclose(first[part][name], value, rtol=1e-5, err_msg=f"{part}: {name}")
