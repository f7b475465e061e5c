"""Each stock callback in one run on digits: logs as in one process, and what it writes or shows comes once."""

from __future__ import annotations

import contextlib
import csv
import functools
import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import models
from tests.worlds import World, in_one_process, on

EPOCHS = 4
GLOBAL_BATCH = 64
WORLDS = on(("horovod", 4), thorough=(("tf", 2),))
QUIET = (
    "History",
    "EarlyStopping",
    "ReduceLROnPlateau",
    "LearningRateScheduler",
    "SwapEMAWeights",
    "tfdist's own",
)


def callbacks_of(name: str, folder: str, port: int, calls: list[str]) -> list[Any]:
    import keras

    import tfdist

    def note(epoch: int, logs: Any = None) -> None:
        calls.append(f"epoch {epoch}: {sorted(logs)}")

    made: dict[str, Callable[[], list[Any]]] = {
        "History": list,
        "EarlyStopping": lambda: [
            keras.callbacks.EarlyStopping("val_loss", min_delta=0.3, patience=1, restore_best_weights=True)
        ],
        "ReduceLROnPlateau": lambda: [
            keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=0.3, patience=1, factor=0.5)
        ],
        "LearningRateScheduler": lambda: [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))
        ],
        "SwapEMAWeights": lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        "ModelCheckpoint": lambda: [keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")],
        "BackupAndRestore": lambda: [
            keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False)
        ],
        "BestModelCheckpoint": lambda: [
            tfdist.callbacks.BestModelCheckpoint(f"{folder}/best.keras", monitor="val_loss")
        ],
        "TensorBoard": lambda: [keras.callbacks.TensorBoard(f"{folder}/logs")],
        "CSVLogger": lambda: [keras.callbacks.CSVLogger(f"{folder}/log.csv")],
        "RemoteMonitor": lambda: [
            keras.callbacks.RemoteMonitor(f"http://127.0.0.1:{port}", path="/publish", send_as_json=True)
        ],
        "LambdaCallback": lambda: [keras.callbacks.LambdaCallback(on_epoch_end=note)],
        "ProgbarLogger": list,
        "tfdist's own": lambda: [
            *tfdist.callbacks.default(check_every=2),
            tfdist.callbacks.MetricAverageCallback(),
        ],
    }
    return made[name]()


def run(name: str, folder: str, port: int = 0) -> dict[str, Any]:
    """Trains on this rank's rows; what came of it."""
    from sklearn.datasets import load_digits

    import tfdist

    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).astype("float32"), labels
    rank, size = tfdist.rank(), tfdist.size()
    x, y, held_out = x[:512], y[:512], (x[512:612], y[512:612])
    model = new_model(use_ema=name == "SwapEMAWeights")
    calls: list[str] = []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = model.fit(
            *(models.part(values, rank, size, GLOBAL_BATCH) for values in (x, y)),
            batch_size=GLOBAL_BATCH // size,
            epochs=EPOCHS,
            shuffle=False,
            verbose=1 if name == "ProgbarLogger" else 0,
            validation_data=tfdist.shard(held_out, batch_size=25),
            callbacks=callbacks_of(name, folder, port, calls),
        ).history
    return {
        "history": {key: [float(value) for value in values] for key, values in history.items()},
        "weights": [np.asarray(weight) for weight in model.get_weights()],
        "calls": calls,
        "printed": printed.getvalue(),
    }


@functools.cache
def compiled(use_ema: bool) -> tuple[Any, list[np.ndarray]]:
    """A model, and its state before training. Most of a run would go into tracing it."""
    import keras

    import tfdist

    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(24, activation="tanh"), keras.layers.Dense(10)]
    )
    optimizer: Any = keras.optimizers.Adam(0.01, use_ema=use_ema, ema_momentum=0.8)
    optimizer.build(model.trainable_variables)
    if tfdist.size() > 1:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model, [variable.numpy() for variable in state_of(model)]


def state_of(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def new_model(*, use_ema: bool) -> Any:
    """An untrained model."""
    model, start = compiled(use_ema)
    for variable, value in zip(state_of(model), start, strict=True):
        variable.assign(value)
    return model


def assert_as_alone(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert set(result["history"]) == set(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(result["history"][key], values, rtol=0, atol=1e-5, err_msg=key)
        for own, other, wanted in zip(
            result["weights"], results[0]["weights"], expected["weights"], strict=True
        ):
            np.testing.assert_array_equal(own, other)
            np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-5)
    assert expected["history"]["loss"][0] > expected["history"]["loss"][-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The run in one process; most callbacks don't change it."""
    known: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        key = name if name in QUIET[1:-1] or name == "ProgbarLogger" else "History"
        if key not in known:
            known[key] = in_one_process(run, key, str(tmp_path_factory.mktemp("alone")))
        return known[key]

    return of


@WORLDS
@pytest.mark.parametrize("name", QUIET)
def test_those_that_decide_or_watch(
    world: World, name: str, alone: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    expected = alone(name)
    assert_as_alone(world.call(run, name, str(tmp_path)), expected)
    assert not list(tmp_path.iterdir())
    if name == "EarlyStopping":
        assert len(expected["history"]["loss"]) < EPOCHS, "it decided something"
    if name == "ReduceLROnPlateau":
        assert len(set(expected["history"]["learning_rate"])) > 1, "it decided something"


@WORLDS
@pytest.mark.parametrize("name", ["ModelCheckpoint", "BackupAndRestore", "BestModelCheckpoint"])
def test_those_that_save(
    world: World, name: str, alone: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    import keras

    expected = alone(name)
    folders = folders_of(world, tmp_path)
    assert_as_alone(world.call(run, name, each=[[name, str(folder)] for folder in folders]), expected)
    assert [any(folder.iterdir()) for folder in folders] == [True] + [False] * (world.size - 1)
    file = {"ModelCheckpoint": f"{EPOCHS}.keras", "BestModelCheckpoint": "best.keras"}.get(name)
    if file is None:
        assert (folders[0] / "backup" / "latest.weights.h5").exists()
        return
    for saved, wanted in zip(
        keras.models.load_model(folders[0] / file).get_weights(), expected["weights"], strict=True
    ):
        np.testing.assert_allclose(saved, wanted, rtol=0, atol=1e-5)


@WORLDS
def test_tensorboard(world: World, alone: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    expected = alone("TensorBoard")
    assert_as_alone(world.call(run, "TensorBoard", str(tmp_path)), expected)
    for part, prefix in (("train", ""), ("validation", "val_")):
        assert len(list((tmp_path / "logs" / part).glob("events.*"))) == 1, "one rank wrote"
        events = EventAccumulator(str(tmp_path / "logs" / part))
        events.Reload()
        for name in ("loss", "accuracy"):
            values = [float(make_ndarray(event.tensor_proto)) for event in events.Tensors(f"epoch_{name}")]
            np.testing.assert_allclose(values, expected["history"][prefix + name], rtol=0, atol=1e-5)


@WORLDS
def test_csv_logger(world: World, alone: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    expected = alone("CSVLogger")
    folders = folders_of(world, tmp_path)
    each = [["CSVLogger", str(folder)] for folder in folders]
    assert_as_alone(world.call(run, "CSVLogger", each=each), expected)
    assert [(folder / "log.csv").exists() for folder in folders] == [True] + [False] * (world.size - 1)
    rows = list(csv.DictReader((folders[0] / "log.csv").open()))
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
    for key, values in expected["history"].items():
        np.testing.assert_allclose([float(row[key]) for row in rows], values, rtol=0, atol=1e-5)


@pytest.fixture
def monitor() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """A server for `RemoteMonitor`: its port, and what was posted."""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], posted
        server.shutdown()
        thread.join()


@WORLDS
def test_remote_monitor(
    world: World,
    alone: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monitor: tuple[int, list[dict[str, Any]]],
) -> None:
    port, posted = monitor
    expected = alone("RemoteMonitor")
    assert_as_alone(world.call(run, "RemoteMonitor", str(tmp_path), port), expected)
    assert [post["epoch"] for post in posted] == list(range(EPOCHS)), "one rank posted"
    for key, values in expected["history"].items():
        np.testing.assert_allclose([post[key] for post in posted], values, rtol=0, atol=1e-5)


@WORLDS
def test_lambda_callback(world: World, alone: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    results = world.call(run, "LambdaCallback", str(tmp_path))
    assert_as_alone(results, alone("LambdaCallback"))
    names = sorted(["accuracy", "loss", "val_accuracy", "val_loss"])
    assert results[0]["calls"] == [f"epoch {epoch}: {names}" for epoch in range(EPOCHS)]
    assert not any(result["calls"] for result in results[1:])


@WORLDS
def test_progress_bar(world: World, alone: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    expected = alone("ProgbarLogger")
    first, *others = world.call(run, "ProgbarLogger", str(tmp_path))
    assert_as_alone([first], expected)
    assert not any(other["printed"] for other in others)
    steps = 512 // GLOBAL_BATCH
    for text in (first["printed"], expected["printed"]):
        assert f"{steps}/{steps}" in text, "the bar counts this rank's steps, which are those of all"
        assert text.count(f"Epoch {EPOCHS}/{EPOCHS}") == 1


def folders_of(world: World, path: Path) -> list[Path]:
    """One for each rank, as on hosts without a shared disk."""
    folders = [path / f"rank{rank}" for rank in range(world.size)]
    for folder in folders:
        folder.mkdir()
    return folders
