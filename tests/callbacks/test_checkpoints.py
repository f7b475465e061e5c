"""Checkpoints in `fit()`: one writer, errors on all ranks, and resuming everywhere from one rank's file."""

from __future__ import annotations

import builtins
import errno
import json
import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.distributed import bodies, models
from tests.played_ranks import as_rank
from tests.worlds import World, on
from tfdist.callbacks import BestModelCheckpoint

PAIRS = on(("tf", 2), ("horovod", 2))
EPOCHS = 4


def compiled(seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    model = models.dense()
    model.compile(
        bodies.wrap(keras.optimizers.Adam(0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(model: Any, *callbacks: Any, epochs: int = EPOCHS, validates: bool = False) -> Any:
    x, y = models.data("dense")
    return model.fit(
        bodies.share(x),
        bodies.share(y),
        batch_size=models.GLOBAL_BATCH // tfdist.size(),
        validation_data=(x, y) if validates else None,
        shuffle=False,
        epochs=epochs,
        callbacks=list(callbacks),
        verbose=0,
    )


def own_folder(folder: str) -> Path:
    """Ranks share no disk."""
    own = Path(folder) / f"rank{tfdist.rank()}"
    own.mkdir(exist_ok=True)
    return own


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is a world of its own."""
    tfdist.init()
    yield
    tfdist.shutdown()


# One writer.


def writing(folder: str) -> dict[str, Any]:
    own = own_folder(folder)
    model = compiled()
    before = bodies.weights_of(model)
    history = fit(
        model,
        keras.callbacks.ModelCheckpoint(own / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(own / "last.keras"),
        keras.callbacks.ModelCheckpoint(own / "last.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(own / "batch{batch}.keras", save_freq=3),
        BestModelCheckpoint(own / "best.keras"),
        keras.callbacks.CSVLogger(own / "log.csv"),
        keras.callbacks.BackupAndRestore(own / "backup", delete_checkpoint=False),
        validates=True,
    ).history
    return bodies.outcome(model, before) | {"files": files_in(own), "losses": history["val_loss"]}


@PAIRS
@pytest.mark.usefixtures("alone")
def test_first_rank_alone_writes_what_plain_keras_loads(world: World, tmp_path: Path) -> None:
    results = world.call(writing, str(tmp_path))
    assert results[0]["files"] == sorted(
        [
            *(f"{epoch}.keras" for epoch in range(1, EPOCHS + 1)),
            *("batch1.keras", "batch2.keras", "batch3.keras", "batch4.keras"),
            *("last.keras", "last.weights.h5", "best.keras", "log.csv"),
            *("backup/latest.weights.h5", "backup/training_metadata.json"),
        ]
    )
    assert results[1]["files"] == []
    assert results[0]["digest"] == results[1]["digest"]
    folder = tmp_path / "rank0"
    for name in ("last.keras", f"{EPOCHS}.keras", "best.keras"):
        with zipfile.ZipFile(folder / name) as archive:
            assert b"tfdist" not in archive.read("config.json")
    loaded = keras.models.load_model(folder / "last.keras")
    weights = compiled()
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(folder / "last.weights.h5")
    for model in (loaded, weights):
        assert int(model.optimizer.iterations) == results[0]["iterations"]
        for own, wanted in zip(bodies.weights_of(model), results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, wanted)
        for own, wanted in zip(model.optimizer.variables, results[0]["slots"], strict=True):
            np.testing.assert_array_equal(own, wanted)
    x, y = models.data("dense")
    best = keras.models.load_model(folder / "best.keras").evaluate(x, y, verbose=0)[0]
    np.testing.assert_allclose(best, min(results[0]["losses"]), rtol=1e-5)


# Resumed.


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2 and tfdist.rank() == 0:
            raise InterruptedError("preempted")


def uninterrupted() -> dict[str, Any]:
    model = compiled()
    before = bodies.weights_of(model)
    fit(model)
    return bodies.outcome(model, before)


def interrupted(folder: str, loses_metadata: bool) -> dict[str, Any]:
    """Trains two epochs, and resumes with a new model that begins otherwise on each rank."""
    own = own_folder(folder) / "backup"
    try:
        fit(compiled(), keras.callbacks.BackupAndRestore(own), Interrupt())
        ended = ""
    except Exception as error:
        ended = type(error).__name__
    left = files_in(own)
    if loses_metadata and own.exists():
        strip_epoch(own)
    model = compiled(seed=100 + tfdist.rank())
    before = bodies.weights_of(model)
    history = fit(model, keras.callbacks.BackupAndRestore(own))
    return bodies.outcome(model, before) | {
        "ended": ended,
        "left": left,
        "epochs": history.epoch,
        "after": own.exists(),
    }


def strip_epoch(folder: Path) -> None:
    """Leaves what plain Keras leaves if it is killed between its two files for the first time."""
    import h5py

    (folder / "training_metadata.json").unlink()
    with h5py.File(folder / "latest.weights.h5", "r+") as file:
        for name in list(file.attrs):
            del file.attrs[name]


@PAIRS
@pytest.mark.usefixtures("alone")
def test_all_ranks_resume_from_the_first_ranks_backup(world: World, tmp_path: Path) -> None:
    results = world.call(interrupted, str(tmp_path), False)
    assert [result["ended"] for result in results] == ["InterruptedError", "PeerFailedError"]
    assert [bool(result["left"]) for result in results] == [True, False]
    assert [result["epochs"] for result in results] == [[2, 3], [2, 3]]
    assert not any(result["after"] for result in results), "a backup is removed when training is over"
    assert results[0]["digest"] == results[1]["digest"]
    expected = uninterrupted()
    assert min(results[1]["moved"]) > 1e-4
    assert [result["iterations"] for result in results] == [expected["iterations"]] * 2
    for key in ("weights", "slots"):
        for own, wanted in zip(results[1][key], expected[key], strict=True):
            np.testing.assert_allclose(own, wanted, atol=1e-5, rtol=1e-5)


@on(("tf", 2))
def test_weights_without_their_epoch_are_restored_everywhere(world: World, tmp_path: Path) -> None:
    """Otherwise only the first rank had the weights, and ranks would drift apart silently."""
    results = world.call(interrupted, str(tmp_path), True)
    assert [result["epochs"] for result in results] == [[0, 1, 2, 3]] * 2
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["iterations"] == (EPOCHS + 2) * models.STEPS


# Failing.


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(folder: str) -> dict[str, tuple[str, str, list[str]]]:
    """Saves that fail on rank 0 in the second epoch; afterwards, all train again."""
    from tfdist import checkpoint

    own = own_folder(folder)
    came: dict[str, tuple[str, str, list[str]]] = {}
    trained = compiled()

    def train(case: str, callback: Any, fail: Callable[[], None], mend: Callable[[], None]) -> None:
        start = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 1 and fail())
        try:
            fit(trained, start, callback, epochs=2)
            said = ("", "")
        except Exception as error:
            said = (type(error).__name__, str(error))
        finally:
            mend()
        came[case] = (*said, files_in(own))

    def full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    def free_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    whole = keras.callbacks.ModelCheckpoint(own / "model.keras")
    train("full disk", whole, full_disk, free_disk)
    weights = keras.callbacks.ModelCheckpoint(own / "model.weights.h5", save_weights_only=True)
    train("full disk, HDF5", weights, full_disk, free_disk)
    train("full disk, best", BestModelCheckpoint(own / "model.keras", "loss"), full_disk, free_disk)
    backup = keras.callbacks.BackupAndRestore(own / "backup", delete_checkpoint=False)
    train("full disk, backup", backup, full_disk, free_disk)

    flush = checkpoint._flush
    batch = keras.callbacks.ModelCheckpoint(own / "model.keras", save_freq=3)
    train(
        "full at the end of a write, between epochs",
        batch,
        lambda: setattr(checkpoint, "_flush", no_space),
        lambda: setattr(checkpoint, "_flush", flush),
    )

    (own / "file").touch()
    nowhere = keras.callbacks.ModelCheckpoint(own / "file" / "model.keras")
    train("no folder", nowhere, lambda: None, lambda: None)
    train("fine again", keras.callbacks.ModelCheckpoint(own / "model.keras"), lambda: None, lambda: None)
    return came


@PAIRS
def test_failed_save_is_an_error_on_all_ranks(world: World, tmp_path: Path) -> None:
    first, second = world.call(failing, str(tmp_path))
    assert first.keys() == second.keys()
    assert (first.pop("fine again")[0], second.pop("fine again")[0]) == ("", "")
    for case, (kind, said, files) in first.items():
        assert issubclass(getattr(builtins, kind), OSError), (case, kind, said)
        other_kind, other_said, other_files = second[case]
        assert other_kind == "PeerFailedError", (case, other_kind, other_said)
        assert "rank 0" in other_said
        assert kind in other_said, case
        assert not any(".tfdist-" in name for name in [*files, *other_files]), case
    assert "space left" in first["full at the end of a write, between epochs"][1]
    for case in ("full disk", "full disk, HDF5", "full disk, backup"):
        assert "bytes are needed" in first[case][1], case
    keras.models.load_model(tmp_path / "rank0" / "model.keras")
    epoch = json.loads((tmp_path / "rank0" / "backup" / "training_metadata.json").read_text())["epoch"]
    assert epoch == 1, "the backup is that of the epoch before"


# `BestModelCheckpoint` by itself.


class Trained:
    """Calls a callback as a loop of one's own does; the model counts its saves."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.saved: list[str] = []
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile(bodies.wrap(keras.optimizers.SGD()), "mse")
        callback.set_model(self.model)
        callback.on_train_begin()

    def epoch(self, number: int, **logs: float) -> None:
        self.callback.on_epoch_begin(number)
        self.callback.on_epoch_end(number, dict(logs))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["min", "max"])
def test_keeps_the_best(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "best.weights.h5"
    loop = Trained(BestModelCheckpoint(path, "value", mode=mode, save_weights_only=True))
    kept = []
    for epoch, value in enumerate([2.0, 3.0, 1.0, 2.5]):
        loop.model.set_weights([np.full((2, 1), value), np.zeros(1)])
        loop.epoch(epoch, value=value)
        other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        other.load_weights(path)
        kept.append(float(other.get_weights()[0][0, 0]))
    assert kept == ([2.0, 2.0, 1.0, 1.0] if mode == "min" else [2.0, 3.0, 3.0, 3.0])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["best.keras", "best.h5", "best.weights.h5"])
def test_is_atomic_without_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """There, tfdist patches nothing."""
    renamed: list[str] = []
    replace = os.replace

    def rename(source: str, target: str) -> None:
        renamed.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", rename)
    callback = BestModelCheckpoint(tmp_path / name, "loss", save_weights_only="weights" in name)
    Trained(callback).epoch(0, loss=1.0)
    assert renamed == [name]
    assert os.listdir(tmp_path) == [name]


@pytest.mark.usefixtures("alone")
def test_path_may_be_set_later(tmp_path: Path) -> None:
    callback = BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="no path"):
        Trained(callback)
    callback.filepath = str(tmp_path / "best.keras")
    Trained(callback).epoch(0, loss=1.0)
    assert os.listdir(tmp_path) == ["best.keras"]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`mode` must be"):
        BestModelCheckpoint(tmp_path / "best.keras", mode="best")
    with pytest.raises(ValueError, match=r"\.keras"):
        BestModelCheckpoint("val_accuracy")  # Horovod's first argument is `monitor`
    with pytest.raises(ValueError, match=r"\.weights\.h5"):
        BestModelCheckpoint(tmp_path / "best.keras", save_weights_only=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_loop_of_ones_own_writes_on_the_first_rank(tmp_path: Path, rank: int) -> None:
    with as_rank(rank, 2):
        Trained(BestModelCheckpoint(tmp_path / "best.keras", "loss")).epoch(0, loss=1.0)
    assert os.listdir(tmp_path) == (["best.keras"] if rank == 0 else [])
