"""Which callbacks run on which rank: files and screens are written once.

Every rank is given the same list of callbacks by the same script. One that writes (a checkpoint, a log, a progress
bar) would write N times, in the worst case into the same file at the same time; so those run on the first rank
only. Callbacks that act on the model run everywhere.
"""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdist import world

_MARK = "_tfdist_every_rank"
# Where such a callback writes, by the name of the attribute that says so.
_PLACES = ("log_dir", "filename", "filepath", "backup_dir")


def every_rank(callback: Any, *, rank: int | None = None) -> Any:
    """Has a callback that writes run on every rank, each writing to a place of its own.

    Without it, `ModelCheckpoint`, `BackupAndRestore`, `TensorBoard`, `CSVLogger`, `RemoteMonitor`,
    `ProgbarLogger` and `LambdaCallback` run on rank 0 only. Every rank calls it.

    Args:
        callback: a Keras callback; a `log_dir` gets a folder `rank<r>`, a file name `.rank<r>` before its suffix.
        rank: number in these names; this process's rank by default.

    Returns:
        The same callback.

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> log = tfdist.callbacks.every_rank(keras.callbacks.CSVLogger("log.csv"))
        >>> log.filename
        'log.rank0.csv'
    """
    number = world.rank() if rank is None else rank
    for name in _PLACES:
        place = getattr(callback, name, None)
        if isinstance(place, str | os.PathLike):
            stem, suffix = os.path.splitext(os.fspath(place))
            own = f"{stem}.rank{number}{suffix}" if suffix else os.path.join(stem, f"rank{number}")
            setattr(callback, name, own)
    setattr(callback, _MARK, True)
    return callback


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
    return isinstance(callback, writers) or type(callback) is keras.callbacks.LambdaCallback
