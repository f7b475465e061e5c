"""How a rank reaches the control server: find it, prove the key, say hello, and retry until the bound."""

from __future__ import annotations

import contextlib
import collections
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdist import errors
from tfdist.cluster import ClusterSpec
from tfdist.control.frames import (
    GREETING_SIZE,
    Frame,
    Opener,
    Part,
    ProtocolViolation,
    Sealer,
    make_answer,
    session_keys,
)
from tfdist.control.rendezvous import (
    LOOPBACK,
    Address,
    NotThereYet,
    Rendezvous,
    derive_key,
    read,
)

_ATTEMPT = 5.0  # bound of one attempt; a silent stranger at a stale address must not use up the whole timeout


class Line:
    """The client's end of an authenticated connection: sends from any thread under the caller's lock."""

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
        """Blocks until the kernel took the whole message."""
        for buffer in self._sealer.seal(header, parts):
            self._socket.sendall(buffer)

    def receive(self, timeout: float) -> Frame | None:
        """The next message, or None if none was complete after `timeout` seconds.

        Raises:
            EOFError: the server closed the connection.
            OSError: it broke.
            ProtocolViolation: what arrived is not from the job's server.
        """
        deadline = time.monotonic() + timeout
        while not self._frames:
            if not self.read(deadline - time.monotonic()):
                return None
        return self._frames.popleft()

    def read(self, timeout: float) -> bool:
        """Waits for bytes, takes them in; False if none came within `timeout` seconds."""
        poll = select.poll()
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
        """Ends the connection under a thread that may be blocked in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Rejected(Exception):
    """The server's final answer to a hello."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def revive(name: str, message: str) -> errors.TfdistError:
    """The exception that the server named."""
    kind = getattr(errors, name, errors.CollectiveError)
    if not (isinstance(kind, type) and issubclass(kind, errors.TfdistError)):
        kind = errors.CollectiveError
    return kind(message)


def dial(
    spec: ClusterSpec,
    rendezvous: Rendezvous,
    *,
    hello: dict[str, Any],
    payload: Part,
    secret: bytes | None,
    known: Address | None,
    timeout: float,
) -> Line:
    """Connects to the control server and is welcomed.

    Args:
        spec: place of this process.
        rendezvous: where to look.
        hello: header of the hello message.
        payload: what the roster will show of this rank.
        secret: the launcher's secret.
        known: address of the server if it is in this process.
        timeout: bound in seconds.

    Raises:
        CollectiveTimeoutError: no control server of this job answered within the bound.
        LauncherError: it answered and found a contradiction.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    while True:
        attempt = min(deadline, time.monotonic() + _ATTEMPT)
        try:
            return _attempt(
                spec, rendezvous, hello=hello, payload=payload, secret=secret, known=known, deadline=attempt
            )
        except NotThereYet as error:
            problem = str(error)
        except EOFError:
            problem = (
                "what listens there closed the connection at once: a process of another job, or TFDIST_SECRET or "
                "TFDIST_JOB differs between the ranks"
            )
        except ProtocolViolation as error:
            problem = f"what listens there is not this job's control server ({error})"
        except TimeoutError:
            problem = "no answer"
        except OSError as error:
            problem = f"no connection: {error.strerror or error}"
        except Rejected as error:
            raise error.error from None
        if time.monotonic() + pause > deadline:
            _give_up(spec, rendezvous, timeout, problem)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def _attempt(
    spec: ClusterSpec,
    rendezvous: Rendezvous,
    *,
    hello: dict[str, Any],
    payload: Part,
    secret: bytes | None,
    known: Address | None,
    deadline: float,
) -> Line:
    address = known or _locate(spec, rendezvous, secret, deadline)
    line = _open(address, deadline)
    try:
        line.send(hello, [payload])
        answer = _await(line, deadline)
        if answer.header["type"] == "welcome":
            return line
        if answer.header.get("retry"):
            raise NotThereYet(answer.header["message"])
        raise Rejected(revive(answer.header["error"], answer.header["message"]))
    except BaseException:
        line.close()
        raise


def _locate(spec: ClusterSpec, rendezvous: Rendezvous, secret: bytes | None, deadline: float) -> Address:
    """Address and key of the control server."""
    if rendezvous.file is not None:
        found = read(rendezvous.file)
        if not secret and not found.key:
            raise NotThereYet("rank 0 was given TFDIST_SECRET, this rank was not")
        return Address(found.host, found.port, derive_key(spec, secret) if secret else found.key)
    host = LOOPBACK if spec.local_size == spec.size else rendezvous.host
    key = derive_key(spec, secret)
    line = _open(Address(host, rendezvous.port, key), deadline)
    # This side closes first, so the port that TensorFlow needs has no connection lingering in TIME_WAIT.
    with contextlib.closing(line):
        line.send({"type": "where"})
        answer = _await(line, deadline).header
    return Address(answer["host"] or host, answer["port"], key)


def _open(address: Address, deadline: float) -> Line:
    sock = socket.create_connection((address.host, address.port), max(deadline - time.monotonic(), 0.001))
    try:
        if sock.getsockname() == sock.getpeername():
            # The kernel may pick the very port that is dialled as the near end's port and connect it to itself.
            raise NotThereYet("nobody listens there yet")
        return Line(sock, address.key, deadline=deadline)
    except BaseException:
        sock.close()
        raise


def _await(line: Line, deadline: float) -> Frame:
    while True:
        frame = line.receive(deadline - time.monotonic())
        if frame is None:
            raise TimeoutError
        if frame.header["type"] != "beat":
            return frame


def _give_up(spec: ClusterSpec, rendezvous: Rendezvous, timeout: float, problem: str) -> NoReturn:
    raise errors.CollectiveTimeoutError(
        f"rank 0 could not be reached within {timeout:g} s by rank {spec.rank} (pid {os.getpid()}, host "
        f"{socket.gethostname()}), which knows of no other rank of {spec.size}. It was expected at "
        f"{rendezvous.url} (last attempt: {problem}). Usual causes: rank 0 failed or hangs before `tfdist.init()` "
        "(look at its output), the ranks were given different rendezvous, a firewall is in between, or rank 0 is "
        "only slow: raise `tfdist.init(timeout=...)`."
    )
