"""How a rank reaches the control server: find it, prove the key, say hello, and retry until the bound."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from tfdist import errors
from tfdist.cluster import ClusterSpec
from tfdist.control.frames import Frame, Part, ProtocolViolation
from tfdist.control.line import Line
from tfdist.control.rendezvous import LOOPBACK, Address, NotThereYet, Rendezvous, derive_key, read

# A silent stranger at a stale address must not use up the whole bound. Once greeted it is no stranger.
_GREETING = 2.0
_ATTEMPT = 5.0


class Unreachable(Exception):
    """This attempt failed, the next one may succeed; the text says why."""


class Rejected(Exception):
    """The server's final answer to a hello."""

    def __init__(self, error: errors.TfdistError) -> None:
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
    deadline: float,
    timeout: float,
) -> tuple[Line, str]:
    """Connects to the control server and is welcomed.

    Args:
        spec: place of this process.
        rendezvous: where to look.
        hello: header of the hello message.
        payload: what the roster will show of this rank.
        secret: the launcher's secret.
        known: address of the server if it is in this process.
        deadline: `time.monotonic()` at which to give up.
        timeout: the bound in seconds that the user knows.

    Returns:
        The connection, and who the server is, for messages.

    Raises:
        CollectiveTimeoutError: no control server of this job answered within the bound.
        LauncherError: it answered and found a contradiction.
    """
    pause = 0.01
    while True:
        attempt = min(deadline, time.monotonic() + _ATTEMPT)
        try:
            address = known or _locate(spec, rendezvous, secret, attempt)
            return knock(address, hello=hello, payload=payload, deadline=attempt)
        except Unreachable as error:
            problem = str(error)
        except Rejected as error:
            raise error.error from None
        if time.monotonic() + pause > deadline:
            _give_up(spec, rendezvous, timeout, problem)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def knock(address: Address, *, hello: dict[str, Any], payload: Part, deadline: float) -> tuple[Line, str]:
    """One attempt at a known address; returns as `dial` does.

    Raises:
        Unreachable: nothing of this job answered.
        Rejected: the server did, and does not want this rank.
    """
    with _explained():
        line = _open(address, deadline)
        try:
            line.send(hello, [payload])
            header = _await(line, deadline).header
            if header["type"] == "welcome":
                return line, f"Rank 0 (host {header['host']}, pid {header['pid']})"
            if header["retry"]:
                raise Unreachable(header["message"])
            raise Rejected(revive(header["error"], header["message"]))
        except BaseException:
            line.close()
            raise


def _locate(spec: ClusterSpec, rendezvous: Rendezvous, secret: bytes | None, deadline: float) -> Address:
    """Address and key of the control server."""
    if rendezvous.file is not None:
        try:
            found = read(rendezvous.file)
        except NotThereYet as error:
            raise Unreachable(str(error)) from None
        if secret is None and not found.key:
            raise Unreachable("rank 0 was given TFDIST_SECRET, this rank was not")
        return Address(found.host, found.port, found.key if secret is None else derive_key(spec, secret))
    key = derive_key(spec, secret)
    # Rank 0 listens on loopback in a one-host job, unless TFDIST_HOST told it otherwise.
    hosts = [LOOPBACK, rendezvous.host] if spec.local_size == spec.size else [rendezvous.host]
    for host in hosts[:-1]:
        with contextlib.suppress(Unreachable):
            return _ask_for_control(Address(host, rendezvous.port, key), deadline)
    return _ask_for_control(Address(hosts[-1], rendezvous.port, key), deadline)


def _ask_for_control(bootstrap: Address, deadline: float) -> Address:
    # This side closes first, so no connection lingers in TIME_WAIT at the port that TensorFlow needs.
    with _explained(), contextlib.closing(_open(bootstrap, deadline)) as line:
        line.send({"type": "where"})
        answer = _await(line, deadline).header
        return Address(answer["host"] or bootstrap.host, answer["port"], bootstrap.key)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns what can go wrong in an attempt into `Unreachable` with a readable text."""
    try:
        yield
    except EOFError:
        raise Unreachable(
            "what listens there hung up at once: a process of another job, or TFDIST_SECRET or TFDIST_JOB "
            "differs between the ranks"
        ) from None
    except ProtocolViolation as error:
        raise Unreachable(f"what listens there is not this job's control server: {error}") from None
    except (LookupError, TypeError, ValueError) as error:
        raise Unreachable(f"what listens there sent an invalid message: {error!r}") from None
    except TimeoutError:
        raise Unreachable("no answer") from None
    except OSError as error:
        raise Unreachable(f"no connection: {error.strerror or error}") from None


def _open(address: Address, deadline: float) -> Line:
    sock = socket.create_connection((address.host, address.port), max(deadline - time.monotonic(), 0.001))
    try:
        if sock.getsockname() == sock.getpeername():
            # A dialled port in the ephemeral range may be chosen for the near end: connected to itself.
            raise Unreachable("nobody listens there yet")
        return Line(sock, address.key, deadline=min(deadline, time.monotonic() + _GREETING))
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
        f"rank 0 could not be reached within {timeout:g} s by rank {spec.rank} (host {socket.gethostname()}, "
        f"pid {os.getpid()}), which knows of no other of the {spec.size} ranks. It was expected at "
        f"{rendezvous.url} (last attempt: {problem}). Usual causes: rank 0 failed or hangs before "
        "`tfdist.init()` (look at its output), the ranks were given different rendezvous, a firewall is in "
        "between, or rank 0 is only slow: raise `tfdist.init(timeout=...)`."
    )
