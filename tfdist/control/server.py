"""The control server: one thread in rank 0's process, one connection per rank.

It knows who is there (start-up barrier, heartbeats, goodbyes), brings ranks together under keys (gatherings),
watches announcements for ranks that run different collectives, and tells everybody when the world has failed.
It only forwards payloads, never reads them. All waiting happens here, against deadlines in one heap of timers,
so that all ranks of a gathering learn the same outcome.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tfdist.control.announcements import AnnouncementLedger, Conflict
from tfdist.control.connection import Connection, WrongKey
from tfdist.control.diagnosis import (
    RankStatus,
    explain_mismatch,
    explain_missing,
    name_ranks,
)
from tfdist.control.frames import Frame, Part, ProtocolViolation
from tfdist.control.gatherings import Allocations, Arrival, Failure, Gathering, Gatherings

PROTOCOL: Final = 1
HEARTBEAT: Final = 1.0

_STRANGER_PATIENCE = 10.0
_MAX_STRANGERS = 128
_INQUIRY_PATIENCE = 0.5
_REJOIN_PATIENCE = 2.0
_STALL = 2.0

_log = logging.getLogger(__name__)


class ControlServer:
    """See the module docstring.

    Args:
        size: number of ranks.
        job: identity of the run.
        key: what every client must hold.
        listener: where ranks connect.
        bootstrap: where ranks ask for `listener`'s port, closed once all are connected.
        public_host: told to clients of `bootstrap`; empty if the host they already reached is right.
        where: the rendezvous, for messages.
        timeout: bound of the start-up barrier in seconds.
        silence: after how many seconds without a byte an open connection counts as lost.
        grace: how long announcements may differ, in seconds.
    """

    def __init__(
        self,
        *,
        size: int,
        job: str,
        key: bytes,
        listener: socket.socket,
        bootstrap: socket.socket | None,
        public_host: str,
        where: str,
        timeout: float,
        silence: float,
        grace: float,
    ) -> None:
        self._size = size
        self._job = job
        self._key = key
        self._listener = listener
        self._bootstrap = bootstrap
        self._public_host = public_host
        self._port = listener.getsockname()[1]
        self._where = where
        self._timeout = timeout
        self._silence = silence
        self._grace = grace

        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._members: dict[int, Connection] = {}
        self._departed: dict[int, Connection] = {}  # said goodbye
        self._started = False
        self._failure: Failure | None = None
        self._refused = 0
        self._gatherings = Gatherings()
        self._next_expiry = math.inf
        self._allocations = Allocations()
        self._ledger = AnnouncementLedger()
        self._disputes: dict[Conflict, float] = {}
        self._inquiries: dict[int, tuple[set[int], Callable[[], None]]] = {}
        self._numbers = itertools.count(1)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._scratch = memoryview(bytearray(256 << 10))
        self._stopping: float | None = None
        self._ended = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tfdist-control-server", daemon=True)

    # Called from other threads.

    def start(self) -> None:
        """Starts to serve."""
        self._thread.start()

    def stop(self, bound: float) -> None:
        """Serves on until every other rank said goodbye, at most `bound` seconds, then ends."""
        if self._thread.is_alive():
            self._stopping = time.monotonic() + bound
            with contextlib.suppress(OSError):
                self._wake_in.send(b"\0")
            self._thread.join(bound + 1.0)

    # The loop.

    def _run(self) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            if self._bootstrap is not None:
                self._selector.register(self._bootstrap, selectors.EVENT_READ, None)
            self._selector.register(self._wake_out, selectors.EVENT_READ, None)
            self._after(self._timeout, self._give_up_start)
            self._after(HEARTBEAT, self._beat)
            while not self._ended:
                self._turn()
        except Exception:
            # Peers see the connections end; the reason belongs into rank 0's output.
            _log.exception("the control server of tfdist failed")
        finally:
            for connection in list(self._connections):
                connection.close()
            for sock in (self._listener, self._bootstrap, self._wake_in, self._wake_out):
                if sock is not None:
                    sock.close()
            self._selector.close()

    def _turn(self) -> None:
        begin = time.monotonic()
        wait = max(min(self._timers[0][0], self._next_expiry) - begin, 0.0)
        ready = self._selector.select(wait)
        stalled = time.monotonic() - begin - wait
        if stalled > _STALL:
            self._forgive(stalled)
        for key, events in ready:
            if key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(64)
            elif key.fileobj is self._listener or key.fileobj is self._bootstrap:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif not key.data.closed:
                self._serve(key.data, events)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        self._expire_gatherings()
        self._consider_ending()

    def _after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._numbers), action))

    def _forgive(self, stalled: float) -> None:
        """This process was stopped, or its interpreter busy, for a while: nobody else is to blame for that."""
        for connection in self._connections:
            connection.heard += stalled
            connection.opened += stalled

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            strangers = [connection for connection in self._connections if connection.rank is None]
            if len(strangers) >= _MAX_STRANGERS + self._size:
                self._drop(min(strangers, key=lambda connection: connection.opened))
            self._connections.add(
                Connection(sock, self._selector, self._key, bootstrap=listener is self._bootstrap)
            )

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ and not connection.closed:
                for frame in connection.receive(self._scratch):
                    self._handle(connection, frame)
        except WrongKey:
            self._refused += 1
            self._drop(connection)
        except EOFError:
            self._drop(connection, "its connection ended without goodbye, so its process ended or was killed")
        except OSError as error:
            self._drop(connection, f"its connection broke ({error.strerror or error})")
        except (ProtocolViolation, KeyError, TypeError, ValueError) as error:
            self._drop(connection, f"it sent an invalid message ({error!r})")

    def _drop(self, connection: Connection, reason: str = "") -> None:
        """Closes a connection; if it was a member's and no goodbye came, that rank is lost."""
        connection.close()
        self._connections.discard(connection)
        rank = connection.rank
        if rank is None or connection.finished or self._members.get(rank) is not connection:
            return
        if self._started:
            self._lose(rank, reason)
        else:
            # At start-up a client may retry; only its absence after that is a loss.
            del self._members[rank]
            self._after(_REJOIN_PATIENCE, lambda: self._require_rejoin(rank, connection, reason))

    def _require_rejoin(self, rank: int, connection: Connection, reason: str) -> None:
        if rank not in self._members and not self._started:
            self._fail("PeerLostError", f"Rank {rank} (host {connection.host}, pid {connection.pid}) is gone at start-up: {reason}.")

    # Messages.

    def _handle(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        kind = header["type"]
        if kind == "where":
            connection.send({"type": "control", "host": self._public_host, "port": self._port})
        elif kind == "hello":
            self._admit(connection, header, frame.parts[0])
        elif connection.rank is None:
            raise ProtocolViolation("a message before hello")
        elif kind == "exchange":
            self._join(connection, header, frame.parts[0])
        elif kind == "announce":
            self._announce(connection.rank, header["key"], header["signature"])
        elif kind == "allocate":
            self._allocate(connection, header)
        elif kind == "heartbeat":
            self._note_sections(connection, header)
        elif kind == "status":
            self._note_sections(connection, header)
            self._count_answer(connection.rank, header["inquiry"])
        elif kind == "inquire":
            request = header["id"]
            self._inquire(lambda: connection.send(
                {"type": "statuses", "id": request, "ranks": [status.to_json() for status in self._statuses()]}
            ))
        elif kind == "goodbye":
            self._part_with(connection, header.get("error"))
        else:
            raise ProtocolViolation(f"unknown message {kind!r}")

    # Start-up.

    def _admit(self, connection: Connection, header: dict[str, Any], hello: Part) -> None:
        rank, instance = int(header["rank"]), str(header["instance"])
        who = f"rank {rank} (host {header['host']}, pid {header['pid']})"
        problem = self._find_contradiction(header, who)
        if problem:
            retry = self._started and header["job"] != self._job
            connection.send({"type": "reject", "error": "LauncherError", "message": problem, "retry": retry})
            if not self._started:
                self._fail("LauncherError", problem)
            connection.close_when_sent()
            return
        if self._failure is not None:
            connection.send({"type": "reject", "error": self._failure[0], "message": self._failure[1], "retry": False})
            connection.close_when_sent()
            return
        previous = self._members.get(rank)
        if previous is not None:  # the same process tries again
            previous.rank = None
            self._drop(previous)
        connection.rank, connection.instance, connection.hello = rank, instance, hello
        connection.host, connection.pid = str(header["host"]), int(header["pid"])
        self._members[rank] = connection
        connection.send({"type": "welcome"})
        if len(self._members) == self._size:
            self._begin()

    def _find_contradiction(self, header: dict[str, Any], who: str) -> str:
        if header["protocol"] != PROTOCOL:
            return (
                f"All ranks must run the same version of tfdist: {who} speaks control protocol "
                f"{header['protocol']}, rank 0 speaks {PROTOCOL}. Install one version on every host."
            )
        if header["job"] != self._job:
            return (
                f"All ranks must belong to one job: {who} is of job {header['job']!r}, rank 0 at {self._where} is "
                f"of job {self._job!r}. Give each run its own rendezvous (`tfdist run` does)."
            )
        if header["size"] != self._size:
            return (
                f"All ranks must agree on the number of ranks: {who} was started with size {header['size']}, rank 0 "
                f"with size {self._size}. Check the launcher's variables (TFDIST_SIZE or its counterpart)."
            )
        rank = header["rank"]
        if not 0 <= rank < self._size:
            return f"Ranks must be in 0..{self._size - 1}: {who} is not. Check TFDIST_RANK or its counterpart."
        claimant = self._members.get(rank) or self._departed.get(rank)
        if claimant is not None and (self._started or claimant.instance != header["instance"]):
            return (
                f"Every rank must be one process: {who} and pid {claimant.pid} on host {claimant.host} both claim "
                f"rank {rank} at {self._where}. Check that the launcher sets a different rank for each process, and "
                "that each run has its own rendezvous."
            )
        return ""

    def _begin(self) -> None:
        self._started = True
        self._close_bootstrap()
        hellos = [connection.hello for _, connection in sorted(self._members.items())]
        for connection in self._members.values():
            connection.send({"type": "start"}, [hello for hello in hellos if hello is not None])

    def _close_bootstrap(self) -> None:
        """Frees the port for TensorFlow's own server, before any rank learns that start-up is over."""
        if self._bootstrap is not None:
            self._selector.unregister(self._bootstrap)
            self._bootstrap.close()
            self._bootstrap = None
            for connection in [connection for connection in self._connections if connection.bootstrap]:
                self._drop(connection)

    def _give_up_start(self) -> None:
        if self._started or self._failure is not None:
            return
        missing = [rank for rank in range(self._size) if rank not in self._members]
        arrived = ", ".join(
            f"{rank} (host {connection.host}, pid {connection.pid})"
            for rank, connection in sorted(self._members.items())[:16]
        )
        refused = (
            f" {self._refused} connection(s) were refused because they held another key: a process of another job, "
            "or TFDIST_SECRET or TFDIST_JOB differs between ranks."
            if self._refused
            else ""
        )
        self._fail(
            "CollectiveTimeoutError",
            f"{name_ranks(missing)} did not start within {self._timeout:g} s: {len(self._members)} of {self._size} "
            f"ranks arrived ({arrived}) at {self._where}.{refused} Usual causes: a process failed or hangs before "
            "`tfdist.init()` (look at its output), it was started with another rendezvous, a firewall blocks the "
            "connection to rank 0, or it is only slow: raise `tfdist.init(timeout=...)`.",
        )

    # Gatherings.

    def _join(self, connection: Connection, header: dict[str, Any], payload: Part) -> None:
        rank = connection.rank
        assert rank is not None
        ranks = tuple(header["ranks"]) if header["ranks"] is not None else tuple(range(self._size))
        gathering = self._gatherings.join(
            rank,
            Arrival(header["id"], payload, header["check"]),
            key=header["key"],
            ranks=ranks,
            operation=header["operation"],
        )
        if gathering.failure is None and self._failure is not None:
            gathering.failure = self._failure
        if gathering.failure is not None:
            self._refuse(gathering, [rank])
            return
        if not gathering.missing:
            self._complete(gathering)
            return
        departed = [other for other in gathering.missing if other in self._departed]
        if departed:
            self._fail_for_departed(gathering, departed)
            return
        deadline = time.monotonic() + header["timeout"]
        if gathering.checks:
            deadline = min(deadline, time.monotonic() + self._grace)  # only to hear the others' side
        if deadline < gathering.deadline:
            gathering.deadline, gathering.patience = deadline, header["timeout"]
            self._next_expiry = min(self._next_expiry, deadline)

    def _complete(self, gathering: Gathering) -> None:
        checks = gathering.checks
        if checks:
            self._fail_gathering(
                gathering, ("CollectiveMismatchError", explain_mismatch(checks, operation=gathering.operation))
            )
            return
        self._gatherings.remove(gathering)
        for rank in gathering.ranks:
            others = [gathering.arrivals[other].payload for other in gathering.ranks if other != rank]
            self._tell(rank, {"type": "result", "id": gathering.arrivals[rank].request}, others)

    def _expire_gatherings(self) -> None:
        """Ends what is overdue. One bound for all: a timer each would keep every payload until its deadline."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = math.inf
        for gathering in self._gatherings.unfinished():
            if now < gathering.deadline:
                self._next_expiry = min(self._next_expiry, gathering.deadline)
                continue
            gathering.deadline = math.inf
            if gathering.checks:
                text = explain_mismatch(gathering.checks, operation=gathering.operation, missing=gathering.missing)
                self._fail_gathering(gathering, ("CollectiveMismatchError", text))
            else:
                self._inquire(functools.partial(self._time_out, gathering))

    def _time_out(self, gathering: Gathering) -> None:
        if gathering.failure is not None or not gathering.missing:
            return
        extra = "".join(
            f"  {name_ranks(other.arrivals)} waits under the same key for another group, {name_ranks(other.ranks)}.\n"
            for other in self._gatherings.same_key(gathering)
        ).rstrip()
        text = explain_missing(
            self._statuses(),
            waiting_for=gathering.operation,
            ranks=gathering.ranks,
            missing=gathering.missing,
            waited=gathering.patience,
            extra=extra,
        )
        self._fail_gathering(gathering, ("CollectiveTimeoutError", text))

    def _fail_for_departed(self, gathering: Gathering, departed: Sequence[int]) -> None:
        self._fail_gathering(
            gathering,
            (
                "PeerLostError",
                f"{gathering.operation!r} can't complete: {name_ranks(departed)} already left the world by "
                "`tfdist.shutdown()` or a regular end. Every rank must call the same collectives before it ends.",
            ),
        )

    def _fail_gathering(self, gathering: Gathering, failure: Failure) -> None:
        gathering.failure = failure
        self._refuse(gathering, list(gathering.arrivals))

    def _refuse(self, gathering: Gathering, ranks: Sequence[int]) -> None:
        """Gives the stored failure to `ranks`; the gathering stays until the late ones got it too."""
        assert gathering.failure is not None
        error, message = gathering.failure
        for rank in ranks:
            request = gathering.arrivals[rank].request
            self._tell(rank, {"type": "error", "id": request, "error": error, "message": message})
        if not gathering.missing:
            self._gatherings.remove(gathering)

    def _tell(self, rank: int, header: dict[str, Any], parts: Sequence[Part] = ()) -> None:
        connection = self._members.get(rank)
        if connection is not None:
            connection.send(header, parts)

    # Allocations and announcements.

    def _allocate(self, connection: Connection, header: dict[str, Any]) -> None:
        answer = self._failure or self._allocations.reserve(header["key"], header["count"])
        if isinstance(answer, int):
            connection.send({"type": "allocated", "id": header["id"], "first": answer})
        else:
            error, message = answer
            connection.send({"type": "error", "id": header["id"], "error": error, "message": message})

    def _announce(self, rank: int, key: str, signature: str) -> None:
        if not self._ledger.post(key, rank, signature):
            return
        now = time.monotonic()
        current = self._ledger.conflicts(key)
        for conflict in [conflict for conflict in self._disputes if conflict.key == key]:
            if conflict not in current:
                del self._disputes[conflict]
        for conflict in current:
            if conflict not in self._disputes:
                self._disputes[conflict] = now
                self._after(self._grace, lambda conflict=conflict: self._judge(conflict))  # type: ignore[misc]

    def _judge(self, conflict: Conflict) -> None:
        since = self._disputes.get(conflict)
        if since is None or time.monotonic() - since < self._grace - 0.01:
            return
        text = explain_mismatch(self._ledger.announced(conflict.key), operation=conflict.key)
        self._fail("CollectiveMismatchError", f"{text} (They differed for {self._grace:g} s.)")

    # Life and death.

    def _beat(self) -> None:
        self._after(HEARTBEAT, self._beat)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.rank is None:
                if now - connection.opened > _STRANGER_PATIENCE:
                    self._drop(connection)
            elif now - connection.heard > self._silence and not connection.finished:
                self._drop_silent(connection, now - connection.heard)
        arrived = None if self._started else sorted(self._members)
        for connection in self._members.values():
            connection.send({"type": "beat", "arrived": arrived})

    def _drop_silent(self, connection: Connection, silence: float) -> None:
        reason = (
            f"nothing came from it for {silence:.0f} s though its connection is open, so its process is stopped, its "
            "host vanished, or its interpreter is blocked"
        )
        self._drop(connection, reason)

    def _lose(self, rank: int, reason: str) -> None:
        status = self._statuses()[rank]
        del self._members[rank]
        self._fail(
            "PeerLostError",
            f"Rank {rank} (host {status.host}, pid {status.pid}) is gone: {reason}. Before that, {status.activity}. "
            "Look at that rank's output for its first error.",
        )

    def _part_with(self, connection: Connection, error: str | None) -> None:
        rank = connection.rank
        assert rank is not None
        connection.finished = True
        connection.send({"type": "bye"})
        connection.close_when_sent()
        self._members.pop(rank, None)
        self._departed[rank] = connection
        who = f"Rank {rank} (host {connection.host}, pid {connection.pid})"
        if error is not None:
            self._fail("PeerLostError", f"{who} failed: {error}")
        elif not self._started:
            self._fail(
                "CollectiveTimeoutError",
                f"{who} gave up waiting for the start of all {self._size} ranks at {self._where}; "
                f"{len(self._members)} of them are waiting there now. Start all ranks at about the same time, or "
                "raise `tfdist.init(timeout=...)`.",
            )
        else:
            for gathering in self._gatherings.unfinished():
                if rank in gathering.missing:
                    self._fail_for_departed(gathering, [rank])

    def _fail(self, error: str, message: str) -> None:
        """The world is over: everybody waiting, and everybody who calls later, learns the first reason."""
        if self._failure is not None:
            return
        self._failure = (error, message)
        for connection in self._members.values():
            connection.send({"type": "failure", "error": error, "message": message})

    def _consider_ending(self) -> None:
        if self._stopping is None:
            return
        done = time.monotonic() >= self._stopping
        if not self._members or done or self._failure is not None:
            for connection in self._members.values():
                connection.send({"type": "closing"})
            self._members.clear()
            self._stopping = min(self._stopping, time.monotonic() + 0.5)
            if done or all(connection.is_flushed for connection in self._connections):
                self._ended = True
        if not self._ended:
            self._after(min(0.05, max(self._stopping - time.monotonic(), 0.0)), lambda: None)

    # What ranks do.

    def _inquire(self, then: Callable[[], None]) -> None:
        """Asks every rank what it is in, and calls `then` when all answered or a moment has passed."""
        number = next(self._numbers)
        self._inquiries[number] = (set(self._members), then)
        self._after(_INQUIRY_PATIENCE, lambda: self._conclude(number))
        for connection in self._members.values():
            connection.send({"type": "question", "inquiry": number})

    def _count_answer(self, rank: int, number: int) -> None:
        if number in self._inquiries:
            waiting = self._inquiries[number][0]
            waiting.discard(rank)
            if not waiting:
                self._conclude(number)

    def _conclude(self, number: int) -> None:
        inquiry = self._inquiries.pop(number, None)
        if inquiry is not None:
            inquiry[1]()

    def _note_sections(self, connection: Connection, header: dict[str, Any]) -> None:
        now = time.monotonic()
        connection.sections = [(str(what), now - ago) for what, ago in header["inside"]]
        left = header["left"]
        connection.left = None if left is None else (str(left[0]), now - left[1])

    def _statuses(self) -> list[RankStatus]:
        now = time.monotonic()
        statuses = []
        for rank in range(self._size):
            connection = self._members.get(rank) or self._departed.get(rank)
            if connection is None:
                statuses.append(RankStatus(rank, "", 0, False, "", "", 0.0, 0.0))
                continue
            if connection.sections:
                (section, since), state = connection.sections[-1], "entered"
            elif connection.left is not None:
                (section, since), state = connection.left, "left"
            else:
                section, since, state = "", now, ""
            statuses.append(
                RankStatus(
                    rank=rank,
                    host=connection.host,
                    pid=connection.pid,
                    alive=rank in self._members,
                    section=section,
                    state=state,
                    since=now - since,
                    heartbeat=now - connection.heard,
                    inside=tuple(what for what, _ in connection.sections),
                )
            )
        return statuses
