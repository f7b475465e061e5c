"""Worlds for tests: several real processes that run functions of the tests on every rank.

Ranks are forked from one process that has imported TensorFlow; still a world takes seconds to start, so tests
share them. Ask for the fixture `world`, and the test runs once in each of the `USUAL` worlds, which have 1, 2 and
4 ranks and both engines; what an engine itself has a part in runs `everywhere`; choose others with `on`:

    from tests.worlds import World, on

    def sum_of_ranks(start: float) -> float:          # module level: workers import it by name
        return float(tfdist.allreduce(tf.constant(start + tfdist.rank()), op=tfdist.Sum))

    def test_everywhere(world: World) -> None:
        results = world.call(sum_of_ranks, 1.0)         # one result per rank, in rank order
        assert results == [sum(1.0 + rank for rank in range(world.size))] * world.size

    @on(("tf", 2), ("horovod", 2))
    def test_on_two(world: World) -> None: ...

Arguments and results are pickled (numpy arrays, not tensors). `world.call` raises `WorldError` with the
tracebacks of the ranks that failed; `world.outcomes` returns errors instead, for tests that expect them, and
`each=` gives every rank its own arguments. A call that hangs is killed, and says so. A test that leaves a world
unusable (it kills a rank, or lets a collective time out) takes `fresh_world`:

    def test_dead_rank(fresh_world: Callable[..., World]) -> None:
        world = fresh_world("tf", 2, timeout=10.0)       # timeout: tfdist's own bound inside the world
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# 1, 2 and 4 ranks, and both engines. That all engines do the same at every size is what the contract proves.
USUAL = (("single", 1), ("horovod", 2), ("tf", 4))
ALL = (("single", 1), ("tf", 2), ("tf", 4), ("horovod", 2), ("horovod", 4))
LARGEST = ("horovod", 4)  # the slowest of them
_START = 240.0  # seconds for importing TensorFlow in many processes on a busy machine
_GRACE = 20.0  # how long the others may go on once a rank has failed
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
_LENGTH = struct.Struct(">Q")


class WorldError(AssertionError):
    """A function failed on some ranks, or hung."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a function did on one rank: returned `value`, or raised an error.

    Attributes:
        value: the result.
        error: the exception, or, if it can't be pickled, a RuntimeError with its text.
        kind: name of the exception's class; empty if there was none.
        traceback: its traceback.
    """

    value: Any = None
    error: BaseException | None = None
    kind: str = ""
    traceback: str = ""


class World:
    """Processes of one world; close it when done."""

    def __init__(
        self,
        backend: str,
        size: int,
        *,
        timeout: float = 60.0,
        strategy: str = "ring",
    ) -> None:
        """Starts the processes, and has them call `tfdist.init()`.

        Args:
            backend: `single`, `tf` or `horovod`.
            size: number of ranks.
            timeout: tfdist's own timeout inside the world, in seconds.
            strategy: what the ranks are started with.
        """
        self.backend = backend
        self.size = size
        self.broken = False
        self.has_ended = False  # for tfdist, by an error of which it does not recover
        self._end = ""
        self._strategy = strategy
        self._folder = Path(tempfile.mkdtemp(prefix="tfdist-world-"))
        self._channels: list[socket.socket] = []
        self._processes: list[ForkServerProcess] = []
        job = secrets.token_hex(8)
        try:
            for rank in range(size):
                self._spawn(rank, job, timeout)
            for outcome in self._collect(_START):
                if outcome.error is not None:
                    raise WorldError(outcome.traceback)
        except BaseException as error:
            text = self._output()
            self.close()
            if isinstance(error, WorldError):
                raise WorldError(f"{error}\n{text}") from None
            raise

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        each: Sequence[Sequence[Any]] | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        """Runs a module-level function on every rank; returns its results in rank order.

        Args:
            function: importable by name.
            *arguments: the same for all ranks.
            each: instead, one sequence of arguments per rank.
            timeout: bound in seconds, after which the world is killed.

        Raises:
            WorldError: with the tracebacks of the ranks that failed.
        """
        outcomes = self.outcomes(function, *arguments, each=each, timeout=timeout)
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if failed:
            reports = "\n".join(f"--- rank {rank} ---\n{outcomes[rank].traceback}" for rank in failed)
            raise WorldError(f"{function.__name__} failed on ranks {failed} of {self}:\n{reports}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        each: Sequence[Sequence[Any]] | None = None,
        timeout: float = 120.0,
    ) -> list[Outcome]:
        """As `call`, but errors are returned; only a hang raises."""
        if self.broken:
            raise WorldError(f"{self} was ended by an earlier call:\n{self._end}")
        name = f"{_importable_module(function)}:{function.__qualname__}"
        for rank, channel in enumerate(self._channels):
            send(channel, (name, tuple(each[rank]) if each is not None else arguments))
        outcomes = self._collect(timeout, what=name)
        ending = {"PeerLostError", "CollectiveTimeoutError", "NotInitializedError"}
        self.has_ended |= any(outcome.kind in ending for outcome in outcomes)
        return outcomes

    def kill(self, rank: int) -> None:
        """Kills one rank's process, as the kernel or an operator would."""
        self._processes[rank].kill()

    def close(self) -> None:
        """Ends all processes, orderly if they still answer."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + (0.0 if self.broken else 15.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for channel in self._channels:
            channel.close()
        self.broken = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def __repr__(self) -> str:
        return f"World({self.backend!r}, {self.size})"

    def _spawn(self, rank: int, job: str, timeout: float) -> None:
        own, theirs = socket.socketpair()
        self._channels.append(own)
        place = {
            "TFDIST_RANK": rank,
            "TFDIST_SIZE": self.size,
            "TFDIST_LOCAL_RANK": rank,
            "TFDIST_LOCAL_SIZE": self.size,
            "TFDIST_CROSS_RANK": 0,
            "TFDIST_CROSS_SIZE": 1,
            "TFDIST_JOB": job,
            "TFDIST_RENDEZVOUS": f"file://{self._folder}/rendezvous",
            "TFDIST_BACKEND": self.backend,
            "TFDIST_TIMEOUT": timeout,
            "TFDIST_STRATEGY": self._strategy,
        }
        variables = _inherited() | {name: str(value) for name, value in place.items()}
        process = _forking().Process(
            target=_serve, args=(theirs, variables, str(self._folder / f"output.{rank}")), daemon=True
        )
        with theirs:
            process.start()
        self._processes.append(process)

    def _collect(self, timeout: float, what: str = "the start") -> list[Outcome]:
        """One outcome per rank; a rank that died counts as failed."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = {channel: rank for rank, channel in enumerate(self._channels) if rank not in outcomes}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.broken = True
                done = "\n".join(outcome.traceback for outcome in outcomes.values() if outcome.traceback)
                for process in self._processes:
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)
                time.sleep(1.0)
                text = self._output()
                for process in self._processes:
                    process.kill()
                hung = sorted(waiting.values())
                self._end = f"{what} hung on ranks {hung} of {self}, which was killed.\n{done}\n{text}"
                raise WorldError(self._end)
            for channel in ready:
                rank = waiting[channel]
                try:
                    outcomes[rank] = receive(channel)
                except (EOFError, OSError):
                    self.broken = True
                    process = self._processes[rank]
                    process.join(10)
                    text = (
                        f"rank {rank} ended with code {process.exitcode} during {what}\n{self._output(rank)}"
                    )
                    self._end = self._end or text
                    outcomes[rank] = Outcome(error=RuntimeError(text), kind="Died", traceback=text)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return [outcomes[rank] for rank in range(self.size)]

    def _output(self, rank: int | None = None) -> str:
        """The first and last lines that ranks printed: a crash tells its cause first."""
        ranks = range(self.size) if rank is None else [rank]
        texts = []
        for number in ranks:
            with contextlib.suppress(OSError):
                lines = (self._folder / f"output.{number}").read_text(errors="replace").splitlines()
                shown = lines if len(lines) <= 60 else [*lines[:20], "...", *lines[-40:]]
                texts.append("\n".join([f"--- output of rank {number} ---", *shown]))
        return "\n".join(texts)


def _inherited() -> dict[str, str]:
    """This process's variables, without what tells of another world."""
    foreign = ("TFDIST_", "HOROVOD_", "OMPI_", "PMI", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | _QUIET


@functools.cache
def _forking() -> ForkServerContext:
    """Starts the process that has imported TensorFlow, and from which ranks are forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras"])
    before = dict(os.environ)
    os.environ.update(_QUIET)  # read when TensorFlow is imported
    os.environ.pop("PYTHONPATH", None)  # ranks may use what `tests.lean` leaves out
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _serve(channel: socket.socket, variables: Mapping[str, str], output: str) -> None:
    """A rank, just forked."""
    os.environ.clear()
    os.environ.update(variables)
    with open(output, "wb") as file, open(os.devnull, "rb") as nothing:
        for source, standard in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source.fileno(), standard)
    from tests import world_worker

    world_worker.main(channel)


def _importable_module(function: Callable[..., Any]) -> str:
    """Module under which a rank can import the function: pytest imports test files by their bare names."""
    path = Path(function.__code__.co_filename)
    if not path.is_relative_to(ROOT):
        return function.__module__
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def on(*worlds: tuple[str, int], thorough: Sequence[tuple[str, int]] = ()) -> pytest.MarkDecorator:
    """Runs a test in these (backend, size) instead of the usual worlds; with `--thorough` also in the others."""
    cases = [pytest.param(each, id=f"{each[0]}{each[1]}") for each in worlds]
    cases += [pytest.param(each, id=f"{each[0]}{each[1]}", marks=pytest.mark.thorough) for each in thorough]
    return pytest.mark.parametrize("world", cases, indirect=True)


def thorough(*values: Any) -> list[Any]:
    """Parameters of a test with which it runs only on request (`--thorough`)."""
    return [pytest.param(each, marks=pytest.mark.thorough) for each in values]


everywhere = on(*(each for each in ALL if each != LARGEST), thorough=(LARGEST,))


def in_one_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `function` in this process, as a world of one rank: what the ranks of others are compared with."""
    import tfdist

    tfdist.init()
    try:
        return function(*arguments)
    finally:
        tfdist.shutdown()


def send(channel: socket.socket, message: Any) -> None:
    """Writes one pickled message."""
    data = pickle.dumps(message)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """Reads one message; EOFError at the end."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    return pickle.loads(_read(channel, length))


def _read(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(1 << 20, length - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
