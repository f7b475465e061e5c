"""A world under `async_parameter_server`, whose chief runs what a test asks for.

Only rank 0 comes back from `tfdist.init()`, so `tests.worlds`, which asks all ranks, does not fit. `tfdist
run` starts the ranks, as for a user; the chief connects to the test by a socket, and calls functions that are
named to it.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.jobs import Ended, start
from tests.worlds import ROOT, receive, send

_START = 240.0  # seconds, on a busy machine
_SOCKET = "ASYNC_WORLD_SOCKET"


class AsyncWorld:
    """A running job; close it when done.

    Args:
        workers: how many compute.
        servers: how many keep variables.
        options: further ones of the strategy, as written.
    """

    def __init__(self, *, workers: int = 2, servers: int = 1, options: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist-async-")
        place = f"{self._folder.name}/socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(place)
        self._listener.listen(1)
        self._listener.settimeout(1.0)
        self.size = 1 + servers + workers
        strategy = f"async_parameter_server(servers={servers}{', ' + options if options else ''})"
        self.job = start(
            [
                *(sys.executable, "-m", "tfdist", "run", "-np", str(self.size), "--strategy", strategy),
                *("--timeout", "120", "-m", "tests.strategies.async_worlds"),
            ],
            **{_SOCKET: place, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        try:
            self.job.wait_until(self._arrived, bound=_START)
        except BaseException:
            self._listener.close()
            self._folder.cleanup()
            raise

    def _arrived(self) -> bool:
        try:
            self._channel, _ = self._listener.accept()
        except TimeoutError:
            return False
        return True

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Has the chief call a module-level function, and does not wait for it."""
        name = ".".join(Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("").parts)
        send(self._channel, (f"{name}:{function.__qualname__}", arguments))

    def finish(self, timeout: float = 120.0) -> Any:
        """What the function returned.

        Raises:
            AssertionError: with its traceback, if it raised.
        """
        self._channel.settimeout(timeout)
        try:
            outcome = receive(self._channel)
        except (EOFError, TimeoutError):
            raise AssertionError(f"the chief ended or hangs:\n{self.job.output()[-6000:]}") from None
        if outcome.error is not None:
            raise AssertionError(f"{outcome.traceback}\n{self.job.output()[-3000:]}")
        return outcome.value

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> Any:
        """Runs a function on the chief, and returns its result."""
        self.begin(function, *arguments)
        return self.finish(timeout)

    def process(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        for process in self.job.members():
            if process.environ().get("TFDIST_RANK") == str(rank) and "multiprocessing" not in str(
                process.cmdline()
            ):
                return process
        raise AssertionError(f"rank {rank} does not run:\n{self.job.output()[-3000:]}")

    def close(self) -> Ended:
        """Lets the chief's script end, and waits for the job."""
        self._channel.close()
        self._listener.close()
        try:
            return self.job.result(bound=60.0)
        finally:
            self._folder.cleanup()


def main() -> None:
    """The script of every rank; only the chief comes past `init`."""
    import tfdist
    from tests.source_tree import expose_callbacks
    from tests.world_worker import run

    expose_callbacks()
    tfdist.init()
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(os.environ[_SOCKET])
    while True:
        try:
            name, arguments = receive(channel)
        except EOFError:
            return
        send(channel, run(name, arguments))


if __name__ == "__main__":
    main()
