"""Processes that save and are killed with SIGKILL, and what their files hold then; run by `test_checkpoint.py`.

They are forked from one process that has imported Keras, which takes seconds, but must not start TensorFlow's
runtime, whose threads a fork would leave behind. By hand, with more kills at random times, and as many of plain
Keras to compare with:

    python -m tests.killed_saves 200 --compare

The last line of the output is the report.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS = (".keras", ".weights.h5", ".h5")
_HUNG = 100  # seconds after which a child ends itself


def run_all(kills: int, *, compare: bool) -> dict[str, Any]:
    modes = ("atomic", "plain")
    return {
        "in a save": {mode: in_a_save(mode) for mode in modes},
        "at each line": {
            "write": at_each_line_of_a_write(),
            "backup": {mode: at_each_line_of_a_backup(mode) for mode in modes},
            "removal": at_each_line_of_a_removal(),
        },
        "at random times": {mode: at_random_times(mode, kills) for mode in (modes if compare else modes[:1])},
    }


# A model whose state is one number.


def model_of(number: float, layers: int = 2) -> Any:
    """All weights, and all variables of the optimizer, are `number`."""
    import keras

    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(layers))])
    model.compile(keras.optimizers.Adam(), keras.losses.MeanSquaredError())
    model.optimizer.build(model.trainable_variables)
    set_all(model, number)
    return model


def set_all(model: Any, number: float) -> None:
    import numpy as np

    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        variable.assign(np.full(variable.shape, number))


def save(model: Any, path: str) -> None:
    (model.save_weights if path.endswith(".weights.h5") else model.save)(path)


def number_in(path: str, layers: int = 2) -> float:
    """The number that all variables of a model in a file are."""
    import keras
    import numpy as np

    if path.endswith(".weights.h5"):
        model = model_of(-1.0, layers)
        model.load_weights(path)
    else:
        model = keras.models.load_model(path)
    variables = [*model.trainable_variables, *model.optimizer.variables]
    numbers = {float(number) for variable in variables for number in np.ravel(variable.numpy())}
    if len(numbers) != 1:
        raise ValueError(f"{path} holds a mixture: {numbers}")
    return numbers.pop()


# Processes.


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a process of its own; "lost" if it raises, None if the process is killed."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(_HUNG)
        try:
            answer = function()
        except Exception:
            traceback.print_exc()
            answer = "lost"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    _, status = os.waitpid(process, 0)
    if not text and os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"a child ended by signal {os.WTERMSIG(status)}")
    return json.loads(text) if text else None


def patch(mode: str) -> None:
    """Puts tfdist's patches into this process, unless `mode` is `plain`."""
    from tfdist import fit_hook, keras_compat

    if mode == "atomic":
        keras_compat.install(fit_hook.FitHook())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def dying_at(line: int, *files: Any) -> Any:
    """Inside, kills this process before the n-th line that it is about to run in these files."""
    names = {str(file) for file in files}
    count = 0

    def in_frame(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        if count == line:
            die()
        return in_frame

    sys.settrace(lambda frame, *_: in_frame if frame.f_code.co_filename in names else None)
    try:
        yield
    finally:
        sys.settrace(None)


# In the middle of a save.


def in_a_save(mode: str) -> dict[str, Any]:
    """A process saves 1.0, and dies in the middle of saving 2.0: what the file holds then, by format."""
    came = {}
    with tempfile.TemporaryDirectory() as folder:
        for suffix in FORMATS:
            path = f"{folder}/model{suffix}"
            if in_child(lambda path=path: _save_twice(mode, path)) is not None:
                raise RuntimeError("was not killed")
            came[suffix] = in_child(lambda path=path: number_in(path))
    return came


def _save_twice(mode: str, path: str) -> None:
    import keras

    patch(mode)
    model = model_of(1.0)
    save(model, path)
    set_all(model, 2.0)

    class Deadly(keras.layers.Dense):
        """Whatever the format, its file is open when the last layer is asked for its part."""

        def get_config(self) -> Any:
            die()

        def save_own_variables(self, store: Any) -> None:
            die()

    model.layers[-1].__class__ = Deadly
    save(model, path)


# At each line.


def at_each_line_of_a_write() -> dict[str, Any]:
    """Kills before each line of `atomically`.

    Returns:
        `held`: what the file holds then, in the order of the lines; `left`: files after the next write.
    """
    from tfdist import checkpoint

    held: list[str] = []
    left: set[str] = set()

    def write(path: Path, line: int) -> str:
        with dying_at(line, checkpoint.__file__), checkpoint.atomically(path, room=10) as temporary:
            Path(temporary).write_text("new")
        return "survived"

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for line in itertools.count(1):
            path.write_text("old")
            answer = in_child(lambda line=line: write(path, line))
            held.append(path.read_text())
            in_child(lambda: write(path, -1))
            left.update(os.listdir(folder))
            if answer is not None:
                return {"held": held, "left": sorted(left)}
    raise AssertionError


class Numbered:
    """A model of one number for `BackupAndRestore`, without TensorFlow."""

    built, optimizer, variables = True, None, ()

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._initial_epoch: int | None = None

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        import h5py

        with h5py.File(filepath, "w") as file:
            file["number"] = self.number

    def load_weights(self, filepath: str) -> None:
        import h5py

        with h5py.File(filepath, "r") as file:
            self.number = int(file["number"][()])


def _backup(folder: str, number: int = 0) -> Any:
    import keras

    callback = keras.callbacks.BackupAndRestore(folder)
    callback.set_model(Numbered(number))
    return callback


def _restored(mode: str, folder: str) -> list[Any]:
    patch(mode)
    callback = _backup(folder)
    callback.on_train_begin()
    return [callback.model.number, callback.model._initial_epoch]


def _at_each_line(mode: str, epochs: int, act: Callable[[Any], None], *files: Any) -> list[Any]:
    """Kills before each line of `act(callback)`; what is restored then: number and epoch, or "lost"."""
    import keras

    from tfdist import checkpoint
    from tfdist.keras_compat import saving

    source = inspect.getsourcefile(keras.callbacks.BackupAndRestore)

    def back_up(folder: str) -> None:
        patch(mode)
        for epoch in range(epochs):
            _backup(folder, epoch + 1).on_epoch_end(epoch)

    def die_there(folder: str, line: int) -> str:
        patch(mode)
        callback = _backup(folder, epochs + 1)
        with dying_at(line, checkpoint.__file__, saving.__file__, source, *files):
            act(callback)
        return "survived"

    came = []
    with tempfile.TemporaryDirectory() as folder:
        before, now = f"{folder}/before", f"{folder}/now"
        in_child(lambda: back_up(before))
        for line in itertools.count(1):
            shutil.copytree(before, now)
            answer = in_child(lambda line=line: die_there(now, line))
            came.append(in_child(lambda: _restored(mode, now)))
            shutil.rmtree(now, ignore_errors=True)
            if answer is not None:
                return came
    raise AssertionError


def at_each_line_of_a_backup(mode: str) -> list[Any]:
    """Epoch 1 is backed up, and the process dies while it backs up epoch 2."""
    return _at_each_line(mode, 1, lambda callback: callback.on_epoch_end(1), __file__)


def at_each_line_of_a_removal() -> list[Any]:
    """Epochs 1 and 2 are backed up, training is over, and the process dies while it removes the backup."""
    return _at_each_line("atomic", 2, lambda callback: callback.on_train_end(), shutil.__file__)


# At random times.


def at_random_times(mode: str, kills: int) -> dict[str, Any]:
    """Processes save 1.0, 2.0, ... and are killed; each begins with what the one before it has left.

    Returns:
        `kills`, completed `saves`, kills `in a write`, which plain Keras does not show, and what was `lost`: files
        that don't load, or are older than the last completed save.
    """
    chance = random.Random(3)
    came: dict[str, Any] = {"kills": 0, "saves": 0, "in a write": 0, "lost": []}
    saved = dict.fromkeys(FORMATS, 0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(kills + len(FORMATS)):
            suffix = FORMATS[number % len(FORMATS)]
            path = f"{folder}/model{suffix}"
            only_loads = number >= kills
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                _save_on_and_on(mode, path, writer, saved[suffix])
            os.close(writer)
            with open(reader) as file:
                loaded = file.readline().strip()
                if only_loads:
                    os.kill(process, signal.SIGKILL)
                else:
                    started = time.monotonic()
                    first = file.readline()
                    time.sleep(chance.random() * 2.5 * (time.monotonic() - started))
                    os.kill(process, signal.SIGKILL)
                    came["kills"] += 1
                os.waitpid(process, 0)
                lines = [] if only_loads else [first, *file.read().split()]
            if loaded not in {f"{saved[suffix] + more}.0" for more in (0, 1)} and number >= len(FORMATS):
                came["lost"].append(f"{path}: {loaded} after {saved[suffix]}")
            came["saves"] += len(lines)
            saved[suffix] = int(float(lines[-1])) if lines else saved[suffix]
            was_written = any(name.endswith(f"-model{suffix}") for name in os.listdir(folder))
            came["in a write"] += was_written and not only_loads
    return came


def _save_on_and_on(mode: str, path: str, writer: int, expected: int) -> None:
    """Tells what it has loaded, then each number that it has saved."""
    parent = os.getppid()
    try:
        patch(mode)
        loaded: Any = "nothing"
        if os.path.exists(path):
            try:
                loaded = number_in(path, layers=4)
            except Exception as error:
                loaded = f"{type(error).__name__}: {error}".replace("\n", " ")
        os.write(writer, f"{loaded}\n".encode())
        number = loaded if isinstance(loaded, float) else float(expected)
        model = model_of(number, layers=4)
        while os.getppid() == parent:
            number += 1
            set_all(model, number)
            save(model, path)
            os.write(writer, f"{number}\n".encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int, help="at random times")
    parser.add_argument("--compare", action="store_true", help="kill plain Keras at random times, too")
    arguments = parser.parse_args()
    # Once, for all children; and frozen, so that their garbage collection copies no memory of this process.
    import h5py  # noqa: F401
    import keras  # noqa: F401

    from tfdist import fit_hook  # noqa: F401

    gc.freeze()
    print(json.dumps(run_all(arguments.kills, compare=arguments.compare)))
