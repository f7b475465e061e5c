"""The server's end of one TCP connection: never blocks, trusts nothing before the handshake."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.control.frames import (
    ANSWER_SIZE,
    MAGIC,
    Frame,
    Opener,
    Part,
    ProtocolViolation,
    Sealer,
    answer_is_valid,
    make_greeting,
    session_keys,
)


class WrongKey(ProtocolViolation):
    """The other side speaks the protocol but holds another key."""


class Connection:
    """A stranger until `opener` exists, a holder of the key from then on, a member once `rank` is set.

    Attributes:
        rank: world rank, set by the server after a valid hello.
        instance: identifies the `connect()` call on the other side.
        host, pid: of the other side, from its hello.
        expendable: whether the world goes on without it, from its hello.
        opened: when it was accepted; strangers get little time.
        heard: when bytes last came from it.
        sections, left: what its heartbeat last told, as (section, when entered) and (section, when left).
    """

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, key: bytes, *, bootstrap: bool
    ) -> None:
        self.rank: int | None = None
        self.instance = ""
        self.host = ""
        self.pid = 0
        self.expendable = False
        self.hello: Part | None = None
        self.bootstrap = bootstrap
        self.opened = self.heard = time.monotonic()
        self.sections: list[tuple[str, float]] = []
        self.left: tuple[str, float] | None = None
        self.closed = False
        self._socket = sock
        self._selector = selector
        self._key = key
        self._greeting = make_greeting()
        self._answer = bytearray()
        self._opener: Opener | None = None
        self._sealer: Sealer | None = None
        self._outgoing: collections.deque[memoryview] = collections.deque()
        self._close_when_sent = False
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, selectors.EVENT_READ, self)
        self._enqueue([self._greeting])

    @property
    def is_stranger(self) -> bool:
        return self._opener is None

    def receive(self, scratch: memoryview) -> Iterator[Frame]:
        """Reads what is there.

        Raises:
            EOFError: the other side closed the connection.
            OSError: it broke.
            ProtocolViolation: what arrived is not ours.
        """
        try:
            size = self._socket.recv_into(scratch)
        except BlockingIOError:
            return
        if not size:
            raise EOFError
        self.heard = time.monotonic()
        data = scratch[:size]
        if self._opener is None:
            taken = data[: ANSWER_SIZE - len(self._answer)]
            self._answer += taken
            data = data[len(taken) :]
            self._check_answer()
        if self._opener is not None:
            yield from self._opener.feed(data)

    def _check_answer(self) -> None:
        answer = bytes(self._answer)
        if not (answer + MAGIC[len(answer) :]).startswith(MAGIC):
            raise ProtocolViolation("not a tfdist client")
        if len(answer) < ANSWER_SIZE:
            return
        if not answer_is_valid(self._key, self._greeting, answer):
            raise WrongKey("the client holds another key")
        from_client, from_server = session_keys(self._key, self._greeting, answer)
        self._opener = Opener(from_client)
        self._sealer = Sealer(from_server)

    def send(self, header: dict[str, Any], parts: Sequence[Part] = ()) -> None:
        """Queues a message and sends what the kernel takes at once."""
        if self._sealer is not None and not self.closed and not self._close_when_sent:
            self._enqueue(self._sealer.seal(header, parts))

    def _enqueue(self, buffers: Sequence[bytes | bytearray]) -> None:
        idle = not self._outgoing
        self._outgoing.extend(memoryview(buffer) for buffer in buffers if buffer)
        if idle:
            # A connection that breaks here is reported by the next read, in the server's one place for
            # losses.
            with contextlib.suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Sends what the kernel takes now."""
        if self.closed:
            return
        try:
            for _ in range(64):  # let others have their turn in between
                if not self._outgoing:
                    break
                view = self._outgoing[0]
                sent = self._socket.send(view[: 1 << 20])
                if sent == len(view):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = view[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()
            self._watch()
            raise
        self._watch()
        if self._close_when_sent and not self._outgoing:
            self.close()

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self)

    def close_when_sent(self) -> None:
        """Closes once everything queued has gone out."""
        self._close_when_sent = True
        if not self._outgoing:
            self.close()

    def close(self) -> None:
        """Closes at once. Idempotent."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()
