"""Who runs which callback, and where a callback writes that runs on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.played_ranks import as_rank
from tfdist.callback_roles import every_rank, runs_on_first_rank_only
from tfdist.callbacks import BestModelCheckpoint


class OwnLambda(keras.callbacks.LambdaCallback):
    pass


class OwnCheckpoint(keras.callbacks.ModelCheckpoint):
    pass


def writers(folder: str) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
        OwnCheckpoint(f"{folder}/model.keras"),
        BestModelCheckpoint(f"{folder}/model.keras"),
        keras.callbacks.BackupAndRestore(f"{folder}/backup"),
        keras.callbacks.TensorBoard(f"{folder}/logs"),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.RemoteMonitor(),
        keras.callbacks.ProgbarLogger(),
        keras.callbacks.LambdaCallback(),
    ]


def test_writers_run_on_the_first_rank_until_told_otherwise(tmp_path: Path) -> None:
    for callback in writers(str(tmp_path)):
        assert runs_on_first_rank_only(callback), callback
        assert not runs_on_first_rank_only(every_rank(callback, rank=1)), callback


def test_callbacks_that_act_on_the_model_run_everywhere() -> None:
    acting = [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.History(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.SwapEMAWeights(),
        keras.callbacks.Callback(),
        OwnLambda(),
    ]
    assert [callback for callback in acting if runs_on_first_rank_only(callback)] == []


@pytest.mark.skipif(
    not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="Keras has no OrbaxCheckpoint yet"
)
def test_orbax_writes_on_the_first_rank_only() -> None:
    callback = object.__new__(keras.callbacks.OrbaxCheckpoint)  # making one takes the package orbax
    assert runs_on_first_rank_only(callback)
    with pytest.raises(ValueError, match="runs on the first rank"):
        every_rank(callback, rank=1)


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("best.keras", "best.rank3.keras"),
        ("runs/v1.2/{epoch:02d}-{val_loss:.2f}.keras", "runs/v1.2/{epoch:02d}-{val_loss:.2f}.rank3.keras"),
    ],
)
def test_model_file_keeps_its_suffix(path: str, own: str) -> None:
    assert every_rank(keras.callbacks.ModelCheckpoint(path), rank=3).filepath == own


def test_weights_file_keeps_the_suffix_that_keras_demands() -> None:
    callback = keras.callbacks.ModelCheckpoint(Path("{epoch}.weights.h5"), save_weights_only=True)
    assert every_rank(callback, rank=3).filepath == "{epoch}.rank3.weights.h5"


@pytest.mark.parametrize("name", ["log.csv", "log"])
def test_log_file(name: str) -> None:
    assert every_rank(keras.callbacks.CSVLogger(name), rank=3).filename == name.replace("log", "log.rank3")


@pytest.mark.parametrize("folder", ["runs/v1.2", "runs/v1.2/", "gs://bucket/v1.2"])
def test_folder_gets_a_folder_though_its_name_has_a_dot(folder: str) -> None:
    board = keras.callbacks.TensorBoard(folder)
    assert every_rank(board, rank=3).log_dir == f"{folder.rstrip('/')}/rank3"


def test_backup_moves_with_all_its_files(tmp_path: Path) -> None:
    """Keras derives the files' paths when the callback is made."""
    folder = str(tmp_path / "backup")
    callback = every_rank(keras.callbacks.BackupAndRestore(folder), rank=3)
    paths = {
        value for value in vars(callback).values() if isinstance(value, str) and value.startswith(folder)
    }
    assert len(paths) > 1
    assert all(path.startswith(f"{folder}/rank3") for path in paths)
    assert callback._weights_path == f"{folder}/rank3/latest.weights.h5"


def test_second_call_changes_nothing() -> None:
    callback = every_rank(every_rank(keras.callbacks.CSVLogger("log.csv"), rank=3), rank=3)
    assert callback.filename == "log.rank3.csv"


def test_number_is_that_of_this_rank() -> None:
    with as_rank(2, 4):
        callback = every_rank(keras.callbacks.CSVLogger(Path("folder") / "log.csv"))
    assert callback.filename == os.path.join("folder", "log.rank2.csv")
