"""The rank's side of a contender: `python -m tfdist.bench.ranks MODULE OPTIONS`.

Imports MODULE and calls its `main(channel, options)`, which prepares, says so, and then answers requests that
arrive on a Unix socket. A socket, because it reaches the ranks under every launcher, mpirun included, which
standard streams don't.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

SOCKET_VARIABLE = "TFDIST_BENCH_SOCKET"
RANK_VARIABLE = "TFDIST_BENCH_RANK"
# Bound in seconds of a world's own waits; long, since being stopped counts. The measuring process has its
# own.
PATIENCE = 3600


class Channel:
    """Connection of one rank to the process that measures.

    Attributes:
        rank: number of this process in its world.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._send({"kind": "hello", "rank": rank, "pid": os.getpid()})
        self._receive()  # from here on, neither side ever has two messages under way

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; all ranks call it, before `ready`."""
        self._send({"kind": "exchange", "value": value})
        return list(self._receive()["values"])

    def ready(self) -> None:
        """Says that this rank is prepared; requests follow."""
        self._send({"kind": "ready"})

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests until the measuring process wants no more."""
        while (request := self.next_request()) is not None:
            yield request

    def next_request(self) -> dict[str, Any] | None:
        """One request; None when there will be no more."""
        request = self._receive()
        return None if request["kind"] == "end" else request

    def answer(self, value: Any) -> None:
        """Answers the last request."""
        self._send({"kind": "answer", "value": value})

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def _receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            os._exit(1)  # nobody measures any more; an orderly end would wait for the other ranks
        message: dict[str, Any] = json.loads(line)
        return message


def own_rank() -> int:
    """This process's rank: told by the bench, or by the launcher that it uses."""
    told = os.environ.get(RANK_VARIABLE)
    if told is not None:
        return int(told)
    from tfdist import cluster

    return cluster.from_environment(os.environ).rank


def _die_with_parent() -> None:
    """A stopped process can't notice that nobody will wake it up; the kernel can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


def main(module: str, options: str) -> None:
    """Runs one rank until the measuring process ends it."""
    _die_with_parent()
    channel = Channel(os.environ[SOCKET_VARIABLE], own_rank())
    importlib.import_module(module).main(channel, json.loads(options))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # figures are delivered; waiting for other ranks' farewells would only cost time
