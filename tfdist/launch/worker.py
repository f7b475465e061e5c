"""One rank of `tfdist.run`. Run as a script: `python worker.py FOLDER`.

Reads the call from the run's private folder and leaves the answer there: ("returned", value, "") or
("raised", exception, traceback).
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import sys
import traceback
from typing import Any


def main(folder: pathlib.Path) -> int:
    """Returns the process's exit code: 1 when the function raised."""
    sys.path[:] = json.loads((folder / "path.json").read_text())
    try:
        answer = _dump("returned", _answer((folder / "call.pickle").read_bytes()))
        code = 0
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers too
        traceback.print_exc()
        answer, code = _dump_error(error), 1
    part = folder / f"part-{os.environ['TFDIST_RANK']}"
    part.write_bytes(answer)
    part.rename(folder / f"answer-{os.environ['TFDIST_RANK']}.pickle")
    return code


def _answer(call: bytes) -> Any:
    import tfdist

    tfdist.init()
    func, args, kwargs = pickle.loads(call)
    value = func(*args, **kwargs)
    tfdist.shutdown()
    return value


def _dump(kind: str, value: Any, text: str = "") -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps((kind, value, text))
    except Exception as error:
        raise TypeError(
            f"What a rank returns to tfdist.run must be picklable; received {type(value).__name__} "
            f"({error}). Return numpy arrays or plain values instead."
        ) from error
    return data


def _dump_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, Exception):
        try:
            data = _dump("raised", error.with_traceback(None), text)
            pickle.loads(data)  # some exceptions can be sent but not received
            return data
        except Exception:
            pass
    return _dump("raised", RuntimeError(f"{type(error).__name__}: {error}"), text)


if __name__ == "__main__":
    status = main(pathlib.Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # After an error other ranks are still in their collectives; an orderly end would wait for them.
    os._exit(status) if status else sys.exit(0)
