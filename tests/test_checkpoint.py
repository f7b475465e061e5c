"""Files that survive kill -9, a full disk and an error in the writer.

What is killed, and how, is in `killed_saves.py`. It runs once for all tests here; the longer run, with 200 kills at
random times, and as many of plain Keras to compare with, is

    python -m tests.killed_saves 200 --compare
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.killed_saves import FORMATS, model_of, number_in, save
from tfdist import checkpoint
from tfdist.checkpoint import atomically

ROOT = Path(__file__).resolve().parents[1]
KILLS = 12


# One write.


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.h5"])
def test_replaces_the_whole_file_at_the_end(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.write_text("old")
    with atomically(target) as temporary:
        assert temporary.endswith(name)
        assert os.path.dirname(temporary) == str(tmp_path)
        assert not os.path.exists(temporary)
        Path(temporary).write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == [name]


def test_file_and_folder_are_flushed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    flush, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append("flush folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "flush file")
        flush(descriptor)

    def rename(source: str, target: str) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    with atomically(tmp_path / "file") as temporary:
        Path(temporary).write_text("new")
    assert calls == ["flush file", "rename", "flush folder"]


def fail_after_a_part(path: str, error: type[BaseException]) -> None:
    Path(path).write_text("ne")
    raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_leaves_the_previous_file_alone(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(error), atomically(target) as temporary:
        fail_after_a_part(temporary, error)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileNotFoundError), atomically(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("path", ["gs://bucket/model.keras", "hf://me/model", "/dev/null"])
def test_what_cannot_be_renamed_over_is_handed_through(path: str) -> None:
    with atomically(path) as given:
        assert given == path


def test_folder_is_handed_through(tmp_path: Path) -> None:
    with atomically(tmp_path) as given:
        assert given == str(tmp_path)


def test_write_within_a_write_is_one_write(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with atomically(target) as outer, atomically(outer) as inner:
        assert inner == outer
        Path(inner).write_text("new")
    assert target.read_text() == "new"


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to("file")
    with atomically(link) as temporary:
        Path(temporary).write_text("new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize("protected", ["file", "."])
def test_protected_file_or_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protected: str
) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    denied = os.path.realpath(tmp_path / protected)
    monkeypatch.setattr(os, "access", lambda path, _: path != denied)  # root may do everything
    rule = "write-protected" if protected == "file" else "must be writable"
    with pytest.raises(PermissionError, match=rule), atomically(target):
        raise AssertionError("must not begin")
    assert target.read_text() == "old"


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), atomically(tmp_path / "nowhere" / "file"):
        raise AssertionError("must not begin")


def test_concurrent_writes_leave_one_of_them(tmp_path: Path) -> None:
    target = tmp_path / "file"
    barrier = threading.Barrier(4)

    def write(text: str) -> None:
        with atomically(target) as temporary:
            barrier.wait(10)
            Path(temporary).write_text(text)

    threads = [threading.Thread(target=write, args=(str(number) * 1000,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() in {str(number) * 1000 for number in range(4)}
    assert os.listdir(tmp_path) == ["file"]


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left(folder: Path, name: str, process: int, host: str = "") -> Path:
    path = folder / f".tfdist-{process}-{host or checkpoint._this_host()}-0a1b2c3d-{name}"
    path.write_text("a part")
    return path


def test_next_write_removes_what_ended_processes_left(tmp_path: Path) -> None:
    stale = [left(tmp_path, "file", ended_process()), left(tmp_path, "file", os.getpid())]
    kept = [
        left(tmp_path, "other-file", ended_process()),  # of another target
        left(tmp_path, "file", os.getppid()),  # it may still be writing
        left(tmp_path, "file", 1, "ffffffff"),  # its host may
    ]
    forgotten = left(tmp_path, "file", 2, "ffffffff")
    os.utime(forgotten, (time.time() - 2 * 86400,) * 2)
    with atomically(tmp_path / "file") as temporary:
        Path(temporary).write_text("new")
    assert not any(path.exists() for path in [*stale, forgotten])
    assert all(path.exists() for path in kept)


# A full disk.


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, files cannot grow beyond `size` bytes: to a writer, a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_the_previous_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    full = os.strerror(errno.EFBIG)
    with largest_file(1000), pytest.raises(OSError, match=full), atomically(target) as temporary:
        Path(temporary).write_bytes(bytes(2000))
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_room_is_tried_before_the_writer_begins(tmp_path: Path) -> None:
    with atomically(tmp_path / "file", room=1000) as temporary:
        assert not os.path.exists(temporary)
        Path(temporary).write_bytes(b"short")
    assert (tmp_path / "file").read_bytes() == b"short"
    target = tmp_path / "file"
    with largest_file(1000), pytest.raises(OSError, match="about 2000"), atomically(target, room=2000):
        raise AssertionError("must not begin")
    assert os.listdir(tmp_path) == ["file"]


# Keras's saves.


@pytest.fixture
def patched() -> Iterator[None]:
    from tfdist import fit_hook, keras_compat

    keras_compat.install(fit_hook.FitHook())
    yield
    keras_compat.uninstall()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("suffix", FORMATS)
def test_failed_save_leaves_the_previous_one(tmp_path: Path, suffix: str) -> None:
    """Without the space being tried first, HDF5 would crash this process on a full disk."""
    path = str(tmp_path / f"model{suffix}")
    save(model_of(1.0), path)
    larger = model_of(2.0, layers=40)
    with largest_file(100_000), pytest.raises(OSError, match="bytes are needed"):
        save(larger, path)
    assert number_in(path) == 1.0
    assert os.listdir(tmp_path) == [f"model{suffix}"]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("suffix", FORMATS)
def test_room_is_about_that_of_the_file(tmp_path: Path, suffix: str) -> None:
    """Less would let HDF5 crash; much more would refuse disks that have the space."""
    from tfdist.keras_compat import saving

    model = model_of(1.0, layers=40)
    path = tmp_path / f"model{suffix}"
    save(model, str(path))
    assert path.stat().st_size <= saving._size_of(model) <= path.stat().st_size + 8192 * 200


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("answer", ["y", "n"])
def test_asks_before_overwriting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, answer: str
) -> None:
    path = str(tmp_path / f"model{suffix}")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    for number in (1.0, 2.0):
        model = model_of(number)
        method = model.save_weights if "weights" in suffix else model.save
        method(path, overwrite=False)
    assert len(asked) == 1
    assert path in asked[0]
    assert number_in(path) == (2.0 if answer == "y" else 1.0)
    assert os.listdir(tmp_path) == [f"model{suffix}"]


@pytest.mark.usefixtures("patched")
def test_folders_shards_and_wrong_names_are_keras_own(tmp_path: Path) -> None:
    import inspect

    import keras

    model = model_of(1.0)
    if "zipped" in inspect.signature(keras.saving.save_model).parameters:
        model.save(tmp_path / "folder", zipped=False)
        assert (tmp_path / "folder" / "config.json").exists()
        assert number_in(str(tmp_path / "folder")) == 1.0
    if "max_shard_size" in inspect.signature(keras.saving.save_weights).parameters:
        model.save_weights(tmp_path / "shards.weights.json", max_shard_size=1e-6)
        assert (tmp_path / "shards.weights.json").exists()
        assert not (tmp_path / "shards.weights.h5").exists()
    with pytest.raises(ValueError, match="extension"):
        model.save(tmp_path / "model.txt")
    with pytest.raises(ValueError, match=r"\.weights\.h5"):
        model.save_weights(tmp_path / "model.h5")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tfdist")]


def test_atomic_saves_leave_the_model_as_it_was() -> None:
    from tfdist.keras_compat import atomic_saves

    model = model_of(1.0)
    before = dict(model.__dict__)
    with atomic_saves(model):
        assert model.save != before.get("save")
    assert model.__dict__.keys() == before.keys()


# Killed.


@pytest.fixture(scope="module")
def killed() -> dict[str, Any]:
    """What came of all kills; see `killed_saves.py`."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.killed_saves", str(KILLS)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


@pytest.mark.thorough
def test_plain_keras_still_loses_both_files(killed: dict[str, Any]) -> None:
    """Once this fails, Keras writes atomically itself: drop `keras_compat.saving` for that version and later."""
    assert killed["in a save"]["plain"] == dict.fromkeys(FORMATS, "lost")


def test_killed_in_a_save(killed: dict[str, Any]) -> None:
    assert killed["in a save"]["atomic"] == dict.fromkeys(FORMATS, 1.0)


def test_killed_at_random_times(killed: dict[str, Any]) -> None:
    came = killed["at random times"]["atomic"]
    assert came["kills"] == KILLS
    assert came["lost"] == []
    assert came["saves"] > 0


def test_killed_at_each_line_of_a_write(killed: dict[str, Any]) -> None:
    came = killed["at each line"]["write"]
    assert set(came["held"]) == {"old", "new"}
    assert came["held"] == sorted(came["held"], reverse=True), "new, and then old again"
    assert came["left"] == ["file"]


def test_killed_at_each_line_of_a_backup(killed: dict[str, Any]) -> None:
    """Weights of one epoch with the number of another would train an epoch twice."""
    came = killed["at each line"]["backup"]
    assert came["atomic"] == sorted(came["atomic"])
    assert {tuple(state) for state in came["atomic"]} == {(1, 1), (2, 2)}
    assert not all(state in ([1, 1], [2, 2]) for state in came["plain"]), (
        "Keras keeps backups whole itself now: drop `recorded_backup` and `consistent_restore`"
    )


def test_killed_while_a_backup_is_removed(killed: dict[str, Any]) -> None:
    """An epoch number without weights would skip all epochs, with fresh weights."""
    came = killed["at each line"]["removal"]
    assert {tuple(state) for state in came} == {(2, 2), (0, None)}
