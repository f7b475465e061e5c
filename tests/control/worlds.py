"""Worlds for tests: one thread per rank, or one process per rank where processes must die."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import ClusterSpec
from tfdist.control import ControlPlane

ROOT = Path(__file__).resolve().parents[2]
BOUND = 30.0


def make_spec(rank: int, size: int, rendezvous: str, /, **changes: Any) -> ClusterSpec:
    spec = ClusterSpec(
        rank=rank, size=size, local_rank=rank, local_size=size, job="job", rendezvous=rendezvous
    )
    return dataclasses.replace(spec, **changes)


def in_threads(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all at once; each result is what the body returned, or the exception it raised."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(place: int) -> None:
        try:
            outcomes[place] = bodies[place]()
        except BaseException as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + BOUND
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def play(size: int, rendezvous: str, body: Callable[[ControlPlane], Any], **options: Any) -> list[Any]:
    """Runs `body` on every rank of a world of threads; results as in `in_threads`."""

    def rank_body(rank: int) -> Any:
        plane = connect(rank, size, rendezvous, **options)
        try:
            return body(plane)
        finally:
            plane.close()

    return in_threads([lambda rank=rank: rank_body(rank) for rank in range(size)])  # type: ignore[misc]


def connect(rank: int, size: int, rendezvous: str, *, timeout: float = 10, **options: Any) -> ControlPlane:
    spec = make_spec(rank, size, rendezvous, **options.pop("spec", {}))
    return ControlPlane.connect(spec, hello={"rank": rank}, timeout=timeout, **options)


@contextlib.contextmanager
def open_world(size: int, rendezvous: str, **options: Any) -> Iterator[list[ControlPlane]]:
    """All ranks' planes, for tests that interleave their calls."""
    planes = in_threads(
        [lambda rank=rank: connect(rank, size, rendezvous, **options) for rank in range(size)]
    )
    for plane in planes:
        if isinstance(plane, BaseException):
            raise plane
    try:
        yield planes
    finally:
        in_threads([plane.close for plane in planes])


def start_process(rank: int, size: int, rendezvous: str, body: str, **options: Any) -> subprocess.Popen[str]:
    """A real process that connects and then runs `body`, in which `plane` is its control channel."""
    code = (
        "import os, signal, sys, time\n"
        "from tests.control.worlds import connect\n"
        f"plane = connect({rank}, {size}, {rendezvous!r}, **{options!r})\n"
        "print('connected', os.getpid(), flush=True)\n"
        f"{body}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@contextlib.contextmanager
def processes(started: Sequence[subprocess.Popen[str]]) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Ends them in any case, and closes their pipes."""
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def wait_for(condition: Callable[[], Any], bound: float = 10.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"nothing happened within {bound} s")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_failed(plane: ControlPlane, kind: type[Exception]) -> Callable[[], bool]:
    return lambda: isinstance(plane.failure, kind)
