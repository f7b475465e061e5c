"""Files that survive: `Model.save`, `Model.save_weights` and `BackupAndRestore` (Keras >= 3.3).

Problem: Keras empties a file before it fills it. A process killed while `ModelCheckpoint` overwrites the last
checkpoint leaves a part of the new one, which does not load, and nothing of the old one; the longer a model takes
to write, the likelier. `BackupAndRestore` has the same fault twice, as it keeps weights and the number of the
epoch in two files: killed between them, it resumes with the weights of one epoch and the number of another; and
killed while it removes them at the end, it may next time skip all epochs with fresh weights.

A full disk is worse for HDF5 files (`.h5`, `.weights.h5`, the weights of a backup): HDF5 crashes the process when
it closes them (h5py issue 914).

Solution: single local files are written by `tfdist.checkpoint.atomically`, after trying whether the disk has the
space. A backup's weights file also holds the number of its epoch, as an HDF5 attribute that Keras ignores; when it
is read, that attribute corrects the other file. Folders (`zipped=False`), shards and remote paths are written as
Keras writes them.

Where ranks divide the optimizer's slots among them, all of them call these methods, and one writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.checkpoint import atomically
from tfdist.keras_compat.replaced import replaced
from tfdist.keras_compat.wrapper import wrapper_of

_SINGLE_FILES = (".keras", ".h5", ".hdf5")
_OVERHEAD = 4096  # bytes that HDF5 spends on a variable and its group, generously
_RECORD = "tfdist_training_metadata"


def atomic_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.save` or `Model.save_weights`, atomic where it writes a single local file."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return _atomic(self, functools.partial(original, self))(*args, **options)

    return method


@contextlib.contextmanager
def atomic_saves(model: Any) -> Iterator[None]:
    """Inside, `model.save` and `model.save_weights` are atomic, whether or not Keras is patched."""
    methods = {name: _atomic(model, getattr(model, name)) for name in ("save", "save_weights")}
    with replaced(model, methods):
        yield


def recorded_backup(original: Callable[..., Any]) -> Callable[..., Any]:
    """`BackupAndRestore._save_model`: the weights file says to which epoch it belongs."""

    @functools.wraps(original)
    def _save_model(self: Any) -> Any:
        with _state_of_all_ranks(self.model) as writes:
            return save_alone(self) if writes else None

    def save_alone(self: Any) -> Any:
        save_weights = self.model.save_weights

        def save_recorded_weights(filepath: str, overwrite: bool) -> None:
            if "://" in filepath:
                save_weights(filepath, overwrite=overwrite)
                return
            with atomically(filepath, room=_size_of(self.model)) as temporary:
                save_weights(temporary)
                _record(temporary, {"epoch": self._current_epoch, "batch": self._last_batch_seen})

        with replaced(self.model, {"save_weights": save_recorded_weights}):
            return original(self)

    return _save_model


def consistent_restore(original: Callable[..., Any]) -> Callable[..., Any]:
    """`BackupAndRestore.on_train_begin`: from the weights file alone, if it says to which epoch it belongs."""

    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        weights, metadata = self._weights_path, self._training_metadata_path
        if "://" not in weights:
            if not os.path.exists(weights):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(metadata)
            elif (record := _recorded(weights)) is not None:
                with atomically(metadata) as temporary, open(temporary, "w") as file:
                    file.write(record)
        original(self, logs)
        if self.model._initial_epoch is None and os.path.exists(weights):
            self.model._initial_epoch = 0  # weights alone are a restored state, too

    return on_train_begin


def _atomic(model: Any, write: Callable[..., Any]) -> Callable[..., Any]:
    def save(filepath: Any, overwrite: bool = True, *args: Any, **options: Any) -> Any:
        with _state_of_all_ranks(model) as writes:
            return save_alone(filepath, overwrite, *args, **options) if writes else None

    def save_alone(filepath: Any, overwrite: bool, *args: Any, **options: Any) -> Any:
        # `zipped` of save, `max_shard_size` of save_weights: all but None and True ask for a folder or shards.
        layout = args[0] if args else options.get("zipped", options.get("max_shard_size"))
        single = layout is None or layout is True
        if not (single and isinstance(filepath, str | os.PathLike) and str(filepath).endswith(_SINGLE_FILES)):
            return write(filepath, overwrite, *args, **options)
        if not overwrite and os.path.exists(filepath) and not _asks_to_proceed(str(filepath)):
            return None
        with atomically(filepath, room=_size_of(model)) as temporary:
            return write(temporary, True, *args, **options)

    return save


def only_take_part(callback: Any) -> None:
    """Leaves to a callback that saves the model just its calls of `model.save`, which another rank writes."""
    callback.verbose = 0
    if hasattr(callback, "_get_file_path"):
        # ModelCheckpoint makes the folder first, and two ranks can't both make one.
        path_of = callback._get_file_path
        callback.__dict__["_get_file_path"] = lambda *args: os.path.basename(path_of(*args))
    for name in ("on_train_begin", "on_train_end"):  # where a backup is read, and removed
        callback.__dict__[name] = _nothing


def _nothing(logs: Any = None) -> None:
    """A callback's method that does nothing."""


@contextlib.contextmanager
def _state_of_all_ranks(model: Any) -> Iterator[bool]:
    """Inside, the rank that writes has all of a state that ranks divide.

    Yields:
        Whether this rank writes.
    """
    distributed = wrapper_of(getattr(model, "optimizer", None))
    if distributed is None:
        yield True
    else:
        with distributed.state_of_all_ranks(model.optimizer) as writes:
            yield writes


def _size_of(model: Any) -> int:
    """Bytes of a file with the model's variables, rather too many."""
    import keras
    import numpy as np

    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    sizes: list[int] = [
        math.prod(variable.shape) * np.dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
        for variable in variables
    ]
    return sum(sizes) + _OVERHEAD * (len(sizes) + 16)


def _asks_to_proceed(filepath: str) -> bool:
    """Keras's own question about a file that exists, with the file's own name in it."""
    from keras.src.utils import io_utils

    return bool(io_utils.ask_to_proceed_with_overwrite(filepath))


def _record(path: str, metadata: dict[str, int]) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path, "r+") as file:
        file.attrs[_RECORD] = json.dumps(metadata)


def _recorded(path: str) -> str | None:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            record = file.attrs.get(_RECORD)
    except OSError:
        return None  # no HDF5 file: Keras reports it, or takes its double
    return None if record is None else str(record)
