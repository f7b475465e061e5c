"""Who is in the world: admission, goodbye, loss, and what each rank was last seen doing."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from typing import Any, Final

from tfdist.control.connection import Connection
from tfdist.control.diagnosis import RankStatus, name_ranks
from tfdist.control.frames import Part
from tfdist.control.gatherings import Failure

PROTOCOL: Final = 1


class Membership:
    """The ranks as the server sees them.

    Args:
        size: number of ranks.
        job: identity of the run.
        owner: instance of the `connect()` call that started this server, the only one that may be rank 0.
        where: the rendezvous, for messages.

    Attributes:
        present: connection by rank of those who are there.
        departed: ranks that said goodbye.
        started: whether all ranks were there once.
        failure: the first reason why the world is over.
    """

    def __init__(self, *, size: int, job: str, owner: str, where: str) -> None:
        self.size = size
        self.present: dict[int, Connection] = {}
        self.departed: set[int] = set()
        self.started = False
        self.failure: Failure | None = None
        self._latest: dict[int, Connection] = {}
        self._lingering: list[Connection] = []
        self._job = job
        self._owner = owner
        self._where = where

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.present]

    # Coming.

    def admit(self, connection: Connection, header: dict[str, Any], hello: Part) -> Connection | None:
        """Makes `connection` a member or rejects it; a contradiction ends a start for everybody.

        Returns:
            The connection that this one replaces, if the same process tries again.
        """
        rank = int(header["rank"])
        who = f"rank {rank} (host {header['host']}, pid {header['pid']})"
        problem = self._find_contradiction(header, who)
        if problem:
            # A running world is not disturbed; and a process of another job may just have found an old
            # rendezvous.
            if not self.started:
                self.fail("LauncherError", problem)
            retry = self.started and header["job"] != self._job
            _reject(connection, ("LauncherError", problem), retry=retry)
            return None
        if self.failure is not None:
            _reject(connection, self.failure, retry=False)
            return None
        previous = self.present.get(rank)
        connection.rank, connection.instance, connection.hello = rank, str(header["instance"]), hello
        connection.host, connection.pid = str(header["host"]), int(header["pid"])
        connection.expendable = bool(header.get("expendable", False))
        self.present[rank] = self._latest[rank] = connection
        connection.send({"type": "welcome", "host": socket.gethostname(), "pid": os.getpid()})
        return previous

    def _find_contradiction(self, header: dict[str, Any], who: str) -> str:
        rank = header["rank"]
        if header["protocol"] != PROTOCOL:
            return (
                f"All ranks must run the same version of tfdist: {who} speaks control protocol "
                f"{header['protocol']}, rank 0 speaks {PROTOCOL}. Install one version on every host."
            )
        if header["job"] != self._job:
            return (
                f"All ranks must belong to one job: {who} is of job {header['job']!r}, rank 0 at "
                f"{self._where} is of job {self._job!r}. Give each run its own rendezvous (`tfdist run` "
                "does)."
            )
        if header["size"] != self.size:
            return (
                f"All ranks must agree on the number of ranks: {who} was started with size {header['size']}, "
                f"rank 0 with size {self.size}. Check the launcher's variables (TFDIST_SIZE or its "
                "counterpart)."
            )
        if not 0 <= rank < self.size:
            return f"Ranks must be in 0..{self.size - 1}: {who} is not. Check TFDIST_RANK or its counterpart."
        claimant = self._latest.get(rank)
        if rank == 0 and header["instance"] != self._owner:
            other = f"pid {os.getpid()} on host {socket.gethostname()}"
        elif claimant is not None and (self.started or claimant.instance != header["instance"]):
            other = f"pid {claimant.pid} on host {claimant.host}"
        else:
            return ""
        return (
            f"Every rank must be one process: {who} and {other} both claim rank {rank} at {self._where}. "
            "Check that the launcher sets a different rank for each process, and that each run has its own "
            "rendezvous."
        )

    def begin(self) -> None:
        """Everybody is there: tells them so, with the roster."""
        self.started = True
        hellos = [connection.hello for _, connection in sorted(self.present.items())]
        for connection in self.present.values():
            connection.send({"type": "start"}, [hello for hello in hellos if hello is not None])

    def explain_absence(self, *, timeout: float, refused: int) -> str:
        """Why the start-up barrier failed."""
        arrived = ", ".join(
            f"{rank} (host {connection.host}, pid {connection.pid})"
            for rank, connection in sorted(self.present.items())[:16]
        )
        strangers = (
            f" {refused} connection(s) were refused because they held another key: a process of another job, "
            "or TFDIST_SECRET or TFDIST_JOB differs between ranks."
            if refused
            else ""
        )
        return (
            f"{name_ranks(self.absent)} did not start within {timeout:g} s: {len(self.present)} of "
            f"{self.size} ranks arrived ({arrived}) at {self._where}.{strangers} Usual causes: a process "
            "failed or hangs before `tfdist.init()` (look at its output), it was started with another "
            "rendezvous, a firewall blocks the connection to rank 0, or it is only slow: raise "
            "`tfdist.init(timeout=...)`."
        )

    # Going.

    @property
    def listening(self) -> list[Connection]:
        """Connections of those who are there, and of those who said goodbye and wait for the others to."""
        return [*self.present.values(), *self._lingering]

    def depart(self, connection: Connection, error: str | None, *, linger: bool) -> None:
        """A goodbye; with `error`, or before the start, it ends the world.

        With `linger` it is answered once all ranks have said goodbye, or the world is over.
        """
        rank = connection.rank
        assert rank is not None
        self.present.pop(rank, None)
        self.departed.add(rank)
        self._lingering.append(connection)
        if not linger:
            self._answer_goodbye(connection)
        if not self.present or self.failure is not None:
            self.release()
        who = f"Rank {rank} (host {connection.host}, pid {connection.pid})"
        if error is not None:
            self.fail("PeerLostError", f"{who} ended early: {error}")
        elif not self.started:
            self.fail(
                "CollectiveTimeoutError",
                f"{who} gave up waiting for the start of all {self.size} ranks at {self._where}; missing "
                f"were {name_ranks(other for other in self.absent if other != rank)}. Start all ranks at "
                "about the same time, or raise `tfdist.init(timeout=...)`.",
            )

    def release(self) -> None:
        """Answers all goodbyes."""
        for connection in list(self._lingering):
            self._answer_goodbye(connection)

    def _answer_goodbye(self, connection: Connection) -> None:
        self._lingering.remove(connection)
        connection.send({"type": "bye"})
        connection.close_when_sent()

    def lose(self, connection: Connection, reason: str) -> None:
        """A rank is gone without goodbye: the end of the world, unless it is expendable.

        It is told, too, in case it still lives.
        """
        rank = connection.rank
        assert rank is not None
        status = dataclasses.replace(self.statuses()[rank], alive=False)
        moment = "" if self.started else " at start-up"
        activity = f" Before that, {status.activity}." if self.started else ""
        text = (
            f"Rank {rank} (host {status.host}, pid {status.pid}) is gone{moment}: {reason}.{activity} Look "
            "at that rank's output for its first error."
        )
        if self.started and connection.expendable:
            self.present.pop(rank, None)
            for other in self.present.values():
                other.send({"type": "lost", "rank": rank, "message": text})
            return
        self.fail("PeerLostError", text)
        self.present.pop(rank, None)

    def fail(self, error: str, message: str) -> None:
        """The world is over: who is there, and who comes later, learns the first reason."""
        if self.failure is None:
            self.failure = (error, message)
            for connection in self.present.values():
                connection.send({"type": "failure", "error": error, "message": message})
            self.release()

    # Doing.

    def note_sections(self, connection: Connection, header: dict[str, Any]) -> None:
        """Takes over what a heartbeat or an answer tells; ages, since clocks differ between hosts."""
        now = time.monotonic()
        connection.sections = [(str(what), now - age) for what, age in header["inside"]]
        left = header["left"]
        connection.left = None if left is None else (str(left[0]), now - left[1])

    def statuses(self) -> list[RankStatus]:
        """What is known about each rank, in rank order."""
        return [self._status(rank) for rank in range(self.size)]

    def _status(self, rank: int) -> RankStatus:
        connection = self._latest.get(rank)
        if connection is None:
            return RankStatus(rank, "", 0, False, "", "", 0.0, 0.0)
        now = time.monotonic()
        if connection.sections:
            (section, since), state = connection.sections[-1], "entered"
        elif connection.left is not None:
            (section, since), state = connection.left, "left"
        else:
            section, since, state = "", now, ""
        return RankStatus(
            rank=rank,
            host=connection.host,
            pid=connection.pid,
            alive=rank in self.present,
            section=section,
            state=state,
            since=now - since,
            heartbeat=now - connection.heard,
            inside=tuple(what for what, _ in connection.sections),
        )


def _reject(connection: Connection, failure: Failure, *, retry: bool) -> None:
    error, message = failure
    connection.send({"type": "reject", "error": error, "message": message, "retry": retry})
    connection.close_when_sent()
