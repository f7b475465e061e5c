"""The client's end of an authenticated connection; blocking, every wait bounded."""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from tfdist.control.frames import GREETING_SIZE, Frame, Opener, Part, Sealer, make_answer, session_keys


class Line:
    """Sends and receives frames; one thread may read while others send, one at a time.

    Args:
        sock: a connected socket; the line owns it.
        key: the job's key.
        deadline: `time.monotonic()` until which the server must have greeted.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, deadline: float) -> None:
        self._socket = sock
        self._frames: collections.deque[Frame] = collections.deque()
        self._scratch = memoryview(bytearray(256 << 10))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = self._read_exactly(GREETING_SIZE, deadline)
        answer = make_answer(key, greeting)
        sock.settimeout(None)
        sock.sendall(answer)
        from_client, from_server = session_keys(key, greeting, answer)
        self._sealer = Sealer(from_client)
        self._opener = Opener(from_server)

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            received = self._socket.recv(size - len(data))
            if not received:
                raise EOFError
            data += received
        return data

    def send(self, header: dict[str, Any], parts: Sequence[Part] = ()) -> None:
        """Blocks until the kernel took the whole message; `hang_up` from another thread ends that."""
        for buffer in self._sealer.seal(header, parts):
            self._socket.sendall(buffer)

    def receive(self, timeout: float) -> Frame | None:
        """The next message, or None if none was complete after `timeout` seconds; raises as `read`."""
        deadline = time.monotonic() + timeout
        while not self._frames:
            if not self.read(deadline - time.monotonic()):
                return None
        return self._frames.popleft()

    def read(self, timeout: float) -> bool:
        """Waits for bytes and takes them in; False if none came within `timeout` seconds.

        Raises:
            EOFError: the server closed the connection.
            OSError: it broke.
            ProtocolViolation: what arrived is not from the job's server.
        """
        poll = select.poll()  # unlike select.select it takes descriptors above 1023
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(timeout, 0.0) * 1000):
            return False
        size = self._socket.recv_into(self._scratch)
        if not size:
            raise EOFError
        self._frames.extend(self._opener.feed(self._scratch[:size]))
        return True

    def take_frames(self) -> list[Frame]:
        """Complete messages that `read` took in."""
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def hang_up(self) -> None:
        """Ends the connection under threads that are blocked in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket; nobody may use it any more."""
        self._socket.close()
