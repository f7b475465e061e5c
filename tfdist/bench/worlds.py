"""Contenders as worlds of fresh processes that take turns.

A world that waits is stopped (SIGSTOP): Horovod's background thread would otherwise go on negotiating with
its peers every millisecond, and take a noticeable part of a core from whoever is measured. The kernel kills
ranks whose parent dies, so not even kill -9 leaves a stopped process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import tfdist
from tfdist.bench.ranks import PATIENCE, RANK_VARIABLE, SOCKET_VARIABLE
from tfdist.errors import TfdistError
from tfdist.launch import tie
from tfdist.launch.plan import Request
from tfdist.launch.run import private_world

_LAST_LINES = 15


class ContenderError(TfdistError):
    """A contender could not be measured."""


class World:
    """Processes of one contender, as the measuring process sees them.

    Attributes:
        name: of the contender.
        size: number of ranks.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        module: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str],
        backend: str | None = None,
        mpirun: Sequence[str] = (),
        stoppable: bool = True,
        timeout: float = 180.0,
    ) -> None:
        """Starts the ranks, one world at a time, and waits until all say that they are ready.

        Args:
            name: of the contender, for messages.
            size: number of ranks.
            module: has `main(channel, options)`, see `tfdist.bench.ranks`.
            options: for it; JSON.
            variables: to add to the ranks' environment.
            backend: engine of a tfdist world; None for a contender without tfdist.
            mpirun: command line that starts `size` ranks, in place of the bench itself.
            stoppable: whether the ranks may be stopped between their turns.
            timeout: bound in seconds of the start and of every answer.

        Raises:
            ContenderError: a rank ended or did not answer in time; with the last lines it wrote.
        """
        self.name, self.size = name, size
        self._stoppable, self._timeout = stoppable, timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: dict[int, int] = {}
        self._lines: dict[int, IO[str]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._exits = contextlib.ExitStack()
        try:
            self._start(module, dict(options), dict(variables), backend, list(mpirun))
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> list[Any]:
        """Sends all ranks the same request; their answers in rank order."""
        for rank in range(self.size):
            try:
                self._send(rank, {"kind": "ask", **request})
            except OSError:
                raise self._rank_ended(rank) from None
        deadline = time.monotonic() + self._timeout
        return [self._receive(rank, "answer", deadline)["value"] for rank in range(self.size)]

    def turn_of_first(self, request: Mapping[str, Any]) -> Any:
        """`turn` of rank 0 alone, where the others serve it and answer nothing."""
        self.resume()
        try:
            self._send(0, request)
            return self._receive(0, "answer", time.monotonic() + self._timeout)["value"]
        finally:
            self.pause()

    def turn(self, request: Mapping[str, Any]) -> list[Any]:
        """`ask`, between waking the ranks up and stopping them again."""
        self.resume()
        try:
            return self.ask(request)
        finally:
            self.pause()

    def pause(self) -> None:
        """Stops the ranks, all of which wait for a request."""
        if self._stoppable:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets stopped ranks go on."""
        if self._stoppable:
            self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends all ranks."""
        self.resume()
        with contextlib.suppress(OSError):
            for rank in self._connections:
                self._send(rank, {"kind": "end"})
        deadline = time.monotonic() + 3.0
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.05, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for connection in self._connections.values():
            connection.close()
        self._exits.close()

    def _start(
        self,
        module: str,
        options: dict[str, Any],
        variables: dict[str, str],
        backend: str | None,
        mpirun: list[str],
    ) -> None:
        # A Unix socket's path is short by law: the system's folder for temporary files, not a deep TMPDIR.
        folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-bench-", dir="/tmp"))
        self._exits.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = self._exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(folder / secrets.token_hex(4)))
        listener.listen(self.size)
        self._log = log = self._exits.enter_context((folder / "log").open("w+b"))

        program = (sys.executable, "-m", "tfdist.bench.ranks", module, json.dumps(options))
        request = Request(program=program, size=self.size, backend=backend, timeout=PATIENCE)
        plan, _ = self._exits.enter_context(private_world(request))
        own = str(pathlib.Path(tfdist.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
        base = {k: v for k, v in os.environ.items() if k not in plan.dropped and k != "TF_USE_LEGACY_KERAS"}
        base |= {"PYTHONPATH": path, SOCKET_VARIABLE: listener.getsockname()}
        # Every contender gets the threads that tfdist's launcher would give its ranks.
        commands: list[tuple[list[str], dict[str, str]]] = []
        for command in plan.ranks:
            chosen = dict(command.variables)
            if backend is None or mpirun:
                chosen = {k: v for k, v in chosen.items() if not k.startswith("TFDIST_")}
            if mpirun:
                chosen |= {"TFDIST_BACKEND": backend or "auto", "TFDIST_TIMEOUT": str(PATIENCE)}
            else:
                chosen[RANK_VARIABLE] = str(command.rank)
            commands.append((list(command.argv), {**base, **chosen, **variables}))
        if mpirun:
            commands = [([*mpirun, *commands[0][0]], commands[0][1])]
        # Not even kill -9 of this process may leave mpirun, and with it stopped ranks, behind.
        tied = [sys.executable, "-I", "-S", tie.__file__, str(os.getpid())]
        for argv, environment in commands:
            self._processes.append(
                subprocess.Popen(
                    [*tied, *argv],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        self._greet(listener)

    def _greet(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self._timeout
        while len(self._connections) < self.size:
            self._wait(listener, "did not connect", deadline)
            connection, _ = listener.accept()
            lines = connection.makefile("r", encoding="utf-8")
            hello = json.loads(lines.readline())
            self._connections[hello["rank"]] = connection
            self._lines[hello["rank"]], self._pids[hello["rank"]] = lines, hello["pid"]
            self._send(hello["rank"], {"kind": "welcome"})
        while True:
            messages = [self._receive(rank, None, deadline) for rank in range(self.size)]
            if all(message["kind"] == "ready" for message in messages):
                return
            for rank in range(self.size):
                self._send(rank, {"kind": "exchanged", "values": [message["value"] for message in messages]})

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        self._connections[rank].sendall((json.dumps(message) + "\n").encode())

    def _receive(self, rank: int, kind: str | None, deadline: float) -> dict[str, Any]:
        self._wait(self._connections[rank], f"did not answer on rank {rank}", deadline)
        line = self._lines[rank].readline()
        if not line:
            raise self._rank_ended(rank)
        message: dict[str, Any] = json.loads(line)
        assert kind is None or message["kind"] == kind, message
        return message

    def _wait(self, source: socket.socket, what: str, deadline: float) -> None:
        while True:
            if select.select([source], [], [], 0.2)[0]:
                return
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended:
                raise ContenderError(
                    f"{self.name}: a process ended with code {ended[0]}. Last lines:\n{self._tail()}"
                )
            if time.monotonic() > deadline:
                raise ContenderError(
                    f"{self.name} {what} within {self._timeout:g} s (--timeout). Last lines:\n{self._tail()}"
                )

    def _rank_ended(self, rank: int) -> ContenderError:
        return ContenderError(f"{self.name}: rank {rank} ended. Its world's last lines:\n{self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line[:300]}" for line in lines[-_LAST_LINES:]) or "    (nothing)"

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def closing_all(worlds: list[World]) -> Iterator[list[World]]:
    """Ends every world in the list at the end, however it comes."""
    try:
        yield worlds
    finally:
        for world in worlds:
            world.close()


def take_turns(worlds: Sequence[World], request: Mapping[str, Any], *, rounds: int) -> list[list[list[Any]]]:
    """Lets the worlds answer in turns, in one order and then in the other.

    Args:
        worlds: all stopped.
        request: the same for all.
        rounds: how often each answers.

    Returns:
        For each world, for each round, its ranks' answers.
    """
    answers: list[list[list[Any]]] = [[] for _ in worlds]
    for number in range(rounds):
        order = range(len(worlds)) if number % 2 == 0 else reversed(range(len(worlds)))
        for place in order:
            answers[place].append(worlds[place].turn(request))
    return answers
