"""The event loop of the server's thread: sockets and timers, nothing about ranks.

One thread and non-blocking sockets: a slow or hostile connection can hold up nobody, and the bookkeeping
needs no locks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final, cast

from tfdist.control.connection import Connection, WrongKey
from tfdist.control.frames import Frame, ProtocolViolation

STALL: Final = 2.0  # an own pause beyond this many seconds is not held against the others

_MAX_STRANGERS = 256


class EventLoop:
    """Accepts connections, reads frames, runs timers.

    Args:
        key: what every client must hold.
        on_frame: called with each authentic frame.
        on_end: called after a connection ended that the server did not close by itself, with the reason.

    Attributes:
        connections: the open ones.
        refused: how many clients held another key.
    """

    def __init__(
        self,
        key: bytes,
        *,
        on_frame: Callable[[Connection, Frame], None],
        on_end: Callable[[Connection, str], None],
    ) -> None:
        self.connections: set[Connection] = set()
        self.refused = 0
        self._key = key
        self._on_frame = on_frame
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[socket.socket, bool] = {}
        self._numbers = itertools.count()
        self._looked = time.monotonic()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._scratch = memoryview(bytearray(256 << 10))
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)

    def add_listener(self, listener: socket.socket, *, bootstrap: bool) -> None:
        """Accepts from `listener` from now on; the loop owns it."""
        self._listeners[listener] = bootstrap
        self._selector.register(listener, selectors.EVENT_READ)

    def close_bootstrap(self) -> None:
        """Closes bootstrap listeners and what came through them."""
        for listener in [listener for listener, bootstrap in self._listeners.items() if bootstrap]:
            del self._listeners[listener]
            self._selector.unregister(listener)
            listener.close()
        for connection in [connection for connection in self.connections if connection.bootstrap]:
            self.forget(connection)

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Calls `action` in the loop's thread in `delay` seconds."""
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._numbers), action))

    def wake(self) -> None:
        """Ends the current wait; from any thread."""
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def forget(self, connection: Connection) -> None:
        """Closes a connection without telling `on_end`."""
        connection.close()
        self.connections.discard(connection)

    def turn(self, until: float) -> None:
        """Waits for something to happen, at most until the next timer or `until`, and deals with it."""
        begin = time.monotonic()
        wait = max(min(until, self._timers[0][0] if self._timers else until) - begin, 0.0)
        ready = self._selector.select(wait)
        self._notice_pause(wait)
        for key, events in ready:
            if key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(64)
            elif key.data is None:
                self._accept(cast(socket.socket, key.fileobj))
            elif not key.data.closed:
                self._serve(key.data, events)
        self._notice_pause()  # a process may be stopped while it serves, too
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        self.connections = {connection for connection in self.connections if not connection.closed}

    def close(self) -> None:
        """Closes everything."""
        for connection in self.connections:
            connection.close()
        for sock in (*self._listeners, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()

    def _notice_pause(self, expected: float = 0.0) -> None:
        """If this process was stopped or busy, that the others seem silent is no fault of theirs."""
        before, self._looked = self._looked, time.monotonic()
        pause = self._looked - before - expected
        if pause <= STALL:
            return
        for connection in self.connections:
            connection.heard += pause
            connection.opened += pause

    def _accept(self, listener: socket.socket) -> None:
        if listener not in self._listeners:
            return
        with contextlib.suppress(OSError):  # BlockingIOError: no more to accept
            for _ in range(64):
                sock, _ = listener.accept()
                strangers = [connection for connection in self.connections if connection.is_stranger]
                if len(strangers) >= _MAX_STRANGERS:
                    self.forget(min(strangers, key=lambda connection: connection.opened))
                bootstrap = self._listeners[listener]
                self.connections.add(Connection(sock, self._selector, self._key, bootstrap=bootstrap))

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ and not connection.closed:
                for frame in connection.receive(self._scratch):
                    self._on_frame(connection, frame)
            return
        except EOFError:
            reason = "its connection ended without goodbye, so its process ended or was killed"
        except OSError as error:
            reason = f"its connection broke ({error.strerror or error})"
        except (ProtocolViolation, LookupError, TypeError, ValueError, AttributeError) as error:
            self.refused += isinstance(error, WrongKey)
            reason = f"it sent an invalid message ({error!r})"
        self.forget(connection)
        self._on_end(connection, reason)
