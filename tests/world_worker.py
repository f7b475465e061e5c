"""One rank of a `tests.worlds.World`: runs functions that the test process names, until it hangs up."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import pickle
import signal
import socket
import sys
import traceback
from typing import Any

from tests.source_tree import expose_callbacks
from tests.worlds import Outcome, receive, send


def run(name: str, arguments: tuple[Any, ...]) -> Outcome:
    """Calls `module:function`; errors become part of the outcome."""
    try:
        module, _, path = name.partition(":")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        outcome = Outcome(value=function(*arguments))
        pickle.dumps(outcome)
        return outcome
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return Outcome(error=RuntimeError(str(error)), kind=type(error).__name__, traceback=text)
        return Outcome(error=error, kind=type(error).__name__, traceback=text)


def start() -> None:
    """Initialises the world from the environment."""
    import tfdist

    tfdist.init()


def main(channel: socket.socket) -> None:
    """Serves calls over the socket."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # a killed pytest leaves no ranks behind
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # how `World` learns where a call hangs
    expose_callbacks()
    first = run(f"{__name__}:start", ())
    gc.collect()
    gc.freeze()  # what is imported stays, and need not be looked at after every test
    gc.set_threshold(100_000)  # nor often while a graph is traced
    send(channel, first)
    while True:
        try:
            name, arguments = receive(channel)
        except EOFError:
            break
        send(channel, run(name, arguments))
        sys.stdout.flush()
        if "keras" in sys.modules:
            import keras

            keras.backend.clear_session()
    if first.error is None:
        import tfdist

        tfdist.shutdown()
