"""The control server: one thread in rank 0's process, one connection per rank.

It forwards payloads and never reads them; what it decides is decided in `membership` and `agreement`.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from tfdist.control.agreement import Agreement
from tfdist.control.connection import Connection
from tfdist.control.frames import Frame, ProtocolViolation
from tfdist.control.loop import EventLoop
from tfdist.control.membership import Membership

HEARTBEAT: Final = 1.0

_STRANGER_PATIENCE = 10.0
_INQUIRY_PATIENCE = 0.5
_REJOIN_PATIENCE = 2.0
_FAREWELL_PATIENCE = 0.5

_log = logging.getLogger(__name__)


class ControlServer:
    """Serves until stopped.

    Args:
        membership: the world to serve, still empty.
        key: what every client must hold.
        listener: where ranks connect.
        bootstrap: where ranks ask for `listener`'s port, closed once all are connected.
        public_host: told to clients of `bootstrap`; empty if the host they already reached is right.
        timeout: bound of the start-up barrier in seconds.
        silence: after how many seconds without a byte an open connection counts as lost.
        grace: how long announcements may differ, in seconds.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        key: bytes,
        listener: socket.socket,
        bootstrap: socket.socket | None,
        public_host: str,
        timeout: float,
        silence: float,
        grace: float,
    ) -> None:
        self._membership = membership
        self._timeout = timeout
        self._silence = silence
        self._address = {"host": public_host, "port": listener.getsockname()[1]}
        self._loop = EventLoop(key, on_frame=self._handle, on_end=self._note_end)
        self._loop.add_listener(listener, bootstrap=False)
        if bootstrap is not None:
            self._loop.add_listener(bootstrap, bootstrap=True)
        self._agreement = Agreement(membership, inquire=self._inquire, after=self._loop.after, grace=grace)
        self._inquiries: dict[int, tuple[set[int], Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._stop_at: float | None = None
        self._farewell_until: float | None = None
        self._thread = threading.Thread(target=self._run, name="tfdist-control-server", daemon=True)

    def start(self) -> None:
        """Starts to serve."""
        self._thread.start()

    def stop(self, bound: float) -> None:
        """Serves on until every rank said goodbye, at most `bound` seconds, then ends."""
        self._stop_at = time.monotonic() + bound
        self._loop.wake()
        self._thread.join(bound + 2 * _FAREWELL_PATIENCE)

    def _run(self) -> None:
        try:
            self._loop.after(self._timeout, self._give_up_start)
            self._loop.after(HEARTBEAT, self._beat)
            while not self._is_done():
                self._loop.turn(min(self._agreement.next_deadline, time.monotonic() + self._longest_turn))
                self._agreement.expire()
        except Exception:
            # Peers see their connections end; the reason belongs into rank 0's output.
            _log.exception("the control server of tfdist failed")
        finally:
            self._loop.close()

    @property
    def _longest_turn(self) -> float:
        return HEARTBEAT if self._stop_at is None else 0.05

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        now = time.monotonic()
        membership = self._membership
        if self._farewell_until is None:
            if now < self._stop_at and membership.present and membership.failure is None:
                return False
            # Clients hang up when they read this, so nothing that was sent to them before gets lost.
            self._farewell_until = now + _FAREWELL_PATIENCE
            for connection in membership.present.values():
                connection.send({"type": "closing"})
            membership.departed.update(membership.present)
            membership.present.clear()
            membership.release()
        members = [connection for connection in self._loop.connections if connection.rank is not None]
        return now >= self._farewell_until or all(connection.closed for connection in members)

    # Messages.

    def _handle(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        kind = header["type"]
        if kind == "where":
            connection.send({"type": "control", **self._address})
            return
        if kind == "hello":
            self._admit(connection, frame)
            return
        rank = connection.rank
        if rank is None:
            raise ProtocolViolation("a message before hello")
        if self._membership.present.get(rank) is not connection:
            return  # declared lost or replaced; it has been told
        if kind == "exchange":
            self._agreement.join(rank, header, frame.parts[0])
        elif kind == "announce":
            self._agreement.announce(rank, header["key"], header["signature"])
        elif kind == "allocate":
            self._agreement.allocate(connection, header)
        elif kind == "heartbeat":
            self._membership.note_sections(connection, header)
        elif kind == "status":
            self._membership.note_sections(connection, header)
            self._count_answer(rank, header["inquiry"])
        elif kind == "inquire":
            self._inquire(lambda: self._send_statuses(connection, header["id"]))
        elif kind == "goodbye":
            self._membership.depart(connection, header["error"], linger=header["linger"])
            self._agreement.fail_those_waiting_for(rank)
        else:
            raise ProtocolViolation(f"unknown message {kind!r}")

    def _admit(self, connection: Connection, frame: Frame) -> None:
        previous = self._membership.admit(connection, frame.header, frame.parts[0])
        if previous is not None:
            self._loop.forget(previous)
        if not self._membership.absent and not self._membership.started:
            # Frees the port for TensorFlow's own server before any rank learns that the start is over.
            self._loop.close_bootstrap()
            self._membership.begin()

    # Time.

    def _give_up_start(self) -> None:
        if not self._membership.started:
            text = self._membership.explain_absence(timeout=self._timeout, refused=self._loop.refused)
            self._membership.fail("CollectiveTimeoutError", text)

    def _beat(self) -> None:
        self._loop.after(HEARTBEAT, self._beat)
        now = time.monotonic()
        for connection in list(self._loop.connections):
            silence = now - connection.heard
            if connection.rank is None:
                if now - connection.opened > _STRANGER_PATIENCE:
                    self._loop.forget(connection)
            elif silence > self._silence and self._membership.present.get(connection.rank) is connection:
                self._membership.lose(
                    connection,
                    f"nothing came from it for {silence:.0f} s though its connection is open, so its process "
                    "is stopped, its host vanished, or its interpreter is blocked",
                )
                self._agreement.fail_those_waiting_for(connection.rank)
                connection.close_when_sent()
        arrived = None if self._membership.started else sorted(self._membership.present)
        for connection in self._membership.listening:
            connection.send({"type": "beat", "arrived": arrived})

    def _note_end(self, connection: Connection, reason: str) -> None:
        membership = self._membership
        rank = connection.rank
        if rank is None or membership.present.get(rank) is not connection:
            return
        if membership.started:
            membership.lose(connection, reason)
            self._agreement.fail_those_waiting_for(rank)
        else:  # at start-up a client may try again
            del membership.present[rank]
            self._loop.after(_REJOIN_PATIENCE, lambda: self._require_rejoin(connection, reason))

    def _require_rejoin(self, connection: Connection, reason: str) -> None:
        if connection.rank not in self._membership.present and not self._membership.started:
            self._membership.lose(connection, reason)

    # Inquiries.

    def _inquire(self, then: Callable[[], None]) -> None:
        """Asks every rank what it is in, and calls `then` when all answered or a moment has passed."""
        number = next(self._numbers)
        self._inquiries[number] = (set(self._membership.present), then)
        self._loop.after(_INQUIRY_PATIENCE, lambda: self._conclude(number))
        for connection in self._membership.present.values():
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

    def _send_statuses(self, connection: Connection, request: int) -> None:
        records = [status.to_json() for status in self._membership.statuses()]
        connection.send({"type": "statuses", "id": request, "ranks": records})
