"""Which callbacks run on which rank: files and screens are written once.

Every rank is given the same list of callbacks by the same script. One that writes (a checkpoint, a log, a progress
bar) would write N times, in the worst case into the same file at the same time; so those run on the first rank
only. Callbacks that act on the model run everywhere.
"""

from __future__ import annotations

import os
import re
from typing import Any

import keras

from tfdist import world

_MARK = "_tfdist_every_rank"
# Where such a callback writes, by the name of the attribute that says so.
_FOLDERS = ("log_dir", "backup_dir")
_FILES = ("filename", "filepath")
_SUFFIX = re.compile(r"(\.weights)?\.\w+$")


def every_rank(callback: Any, *, rank: int | None = None) -> Any:
    """Has a callback that writes run on every rank, each writing to a place of its own.

    Without it, `ModelCheckpoint`, `BackupAndRestore`, `TensorBoard`, `CSVLogger`, `RemoteMonitor`,
    `ProgbarLogger` and `LambdaCallback` run on rank 0 only. Every rank calls it.

    Args:
        callback: a Keras callback; its folder gets a folder `rank<r>`, its file's name `.rank<r>` before the
            suffix. A second call changes nothing.
        rank: number in these names; this process's rank by default.

    Raises:
        ValueError: the callback has already opened its folder, as `OrbaxCheckpoint` has.

    Returns:
        The same callback.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> log = tfdist.callbacks.every_rank(keras.callbacks.CSVLogger("log.csv"))
        >>> log.filename
        'log.rank0.csv'
    """
    if getattr(callback, _MARK, False):
        return callback
    if _is_orbax(callback):
        raise ValueError(
            "OrbaxCheckpoint opens its folder when it is made, so it cannot be given one per rank afterwards. "
            "Leave out `every_rank`: it then runs on the first rank."
        )
    number = world.rank() if rank is None else rank
    for name in (*_FOLDERS, *_FILES):
        place = getattr(callback, name, None)
        if isinstance(place, str | os.PathLike):
            before = os.fspath(place).rstrip("/")
            suffix = found[0] if name in _FILES and (found := _SUFFIX.search(before)) else ""
            joint = "/" if name in _FOLDERS else "."
            now = f"{before.removesuffix(suffix)}{joint}rank{number}{suffix}"
            setattr(callback, name, now)
            _move_derived(callback, before, now)
    setattr(callback, _MARK, True)
    return callback


def _move_derived(callback: Any, before: str, now: str) -> None:
    """Moves what the callback has put into its folder already when it was made."""
    for name, value in list(vars(callback).items()):
        if isinstance(value, str) and value.startswith(f"{before}/") and value != now:
            setattr(callback, name, now + value[len(before) :])


def runs_on_first_rank_only(callback: Any) -> bool:
    """Whether a callback writes, or shows, what need be written or shown only once."""
    if getattr(callback, _MARK, False):
        return False
    writers = (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.BackupAndRestore,
        keras.callbacks.TensorBoard,
        keras.callbacks.CSVLogger,
        keras.callbacks.RemoteMonitor,
        keras.callbacks.ProgbarLogger,
    )
    if isinstance(callback, writers) or _is_orbax(callback):
        return True
    return type(callback) is keras.callbacks.LambdaCallback


def saves_model(callback: Any) -> bool:
    """Whether a callback saves the model: where ranks divide its state, all of them take part, and one writes."""
    return isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)


def _is_orbax(callback: Any) -> bool:
    """Keras has this callback from 3.12 on."""
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    return orbax is not None and isinstance(callback, orbax)
