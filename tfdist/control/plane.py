"""`ControlPlane`: a rank's handle on the control channel."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist import errors
from tfdist.cluster import ClusterSpec
from tfdist.control import rendezvous as meeting
from tfdist.control.diagnosis import RankStatus, explain_missing, guess_missing, name_ranks
from tfdist.control.dialing import Line, dial, revive
from tfdist.control.frames import Frame, Part, ProtocolViolation
from tfdist.control.payloads import decode_payload, encode_payload
from tfdist.control.server import HEARTBEAT, PROTOCOL, ControlServer

_SLACK = 10.0  # how much longer than the server a client waits before it stops believing in the server
_GOODBYE_PATIENCE = 2.0
_SERVER_LINGER = 3.0
_STALL = 2.0

_log = logging.getLogger(__name__)


class _Pending:
    """A request that waits for its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.frame: Frame | None = None
        self.error: Exception | None = None


class ControlPlane:
    """One authenticated TCP connection per rank to a small server inside rank 0's process.

    All methods may be called from any thread. Every wait is bounded.

    Attributes:
        spec: place of this process.
        roster: every rank's `hello`, in rank order.
    """

    spec: ClusterSpec
    roster: list[dict[str, Any]]

    def __init__(self, spec: ClusterSpec, *, timeout: float, silence: float) -> None:
        """Use `connect`."""
        self.spec = spec
        self.roster = []
        self._timeout = timeout
        self._silence = silence
        self._rendezvous = meeting.parse_rendezvous(spec)
        self._instance = secrets.token_hex(16)
        self._server: ControlServer | None = None
        self._published = False
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._send_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._allocated: dict[tuple[str, int], int] = {}
        self._sections: dict[int, tuple[str, float]] = {}
        self._left: tuple[str, float] | None = None
        self._started = threading.Event()
        self._arrived: list[int] = []
        self._failure: errors.TfdistError | None = None
        self._callbacks: list[Callable[[Exception], None]] = []
        self._server_left = False
        self._closing = False
        self._closed = False

    # Start and end.

    @classmethod
    def connect(
        cls,
        spec: ClusterSpec,
        *,
        hello: dict[str, Any],
        timeout: float,
        secret: bytes | None = None,
        host: str | None = None,
        silence: float | None = None,
        grace: float = 5.0,
    ) -> ControlPlane:
        """Start-up barrier: returns once all `spec.size` ranks are there. Every rank must call it.

        With a `file://` rendezvous and no secret, the key of the channel is random and only readable by the user
        who owns the file. With `tcp://` and no secret it is derived from `spec.job`, which keeps other jobs and
        accidental traffic out, but not somebody who knows the job's name: give a secret where hosts are shared.
        Messages are authenticated, not encrypted.

        Args:
            spec: place of this process; `spec.rendezvous` says where ranks meet.
            hello: what all ranks shall know of this one; JSON values and bytes.
            timeout: bound in seconds of the start, and the default of `exchange`.
            secret: key that the launcher gave to all ranks.
            host: address at which rank 0 listens, if not the default (loopback for a one-host job, otherwise the
                host of the tcp rendezvous, otherwise the address of the host's own name).
            silence: after how many seconds without a sign of life an open connection counts as lost; by default
                `max(15, min(timeout, 60))`, because TensorFlow can hold Python's interpreter lock that long.
            grace: for how many seconds announcements may differ.

        Raises:
            CollectiveTimeoutError: a rank did not come; names the missing ones.
            LauncherError: two processes claim one rank, or ranks differ in size, job or version; raised on all.
            PeerLostError: a rank died during the start.
        """
        if silence is None:
            silence = max(15.0, min(timeout, 60.0))
        plane = cls(spec, timeout=timeout, silence=silence)
        deadline = time.monotonic() + timeout
        try:
            known = plane._serve(secret=secret, host=host, grace=grace) if spec.rank == 0 else None
            plane._line = dial(
                spec,
                plane._rendezvous,
                hello={
                    "type": "hello",
                    "protocol": PROTOCOL,
                    "rank": spec.rank,
                    "size": spec.size,
                    "job": spec.job,
                    "instance": plane._instance,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                },
                payload=Part.of(encode_payload(hello)),
                secret=secret,
                known=known,
                timeout=timeout,
            )
            plane._thread = threading.Thread(target=plane._run, name="tfdist-control-client", daemon=True)
            plane._thread.start()
            plane._await_start(deadline)
        except BaseException:
            plane.close()
            raise
        return plane

    def _serve(self, *, secret: bytes | None, host: str | None, grace: float) -> meeting.Address:
        """Starts the server and publishes where it is."""
        rendezvous, spec = self._rendezvous, self.spec
        bind_host = meeting.choose_bind_host(spec, rendezvous, host)
        key = meeting.new_key() if rendezvous.file is not None and not secret else meeting.derive_key(spec, secret)
        listener = meeting.listen(bind_host, 0, backlog=spec.size + 64)
        bootstrap = None
        try:
            if rendezvous.host:
                bootstrap = meeting.listen(bind_host, rendezvous.port, backlog=spec.size + 64)
            port = listener.getsockname()[1]
            if rendezvous.file is not None:
                self._publish(meeting.Address(bind_host, port, b"" if secret else key, spec.job, self._instance))
        except BaseException:
            listener.close()
            if bootstrap is not None:
                bootstrap.close()
            raise
        self._server = ControlServer(
            size=spec.size,
            job=spec.job,
            key=key,
            listener=listener,
            bootstrap=bootstrap,
            public_host=host or "",
            where=rendezvous.url,
            timeout=self._timeout,
            silence=self._silence,
            grace=grace,
        )
        self._server.start()
        return meeting.Address(bind_host, port, key)

    def _publish(self, address: meeting.Address) -> None:
        file = self._rendezvous.file
        assert file is not None
        meeting.publish(file, address, replace=True)
        self._published = True

    def _await_start(self, deadline: float) -> None:
        # Rank 0's server gives up at its own bound with the fuller message; this one holds without it, too.
        slack = 1.0 if self._server is not None else 0.0
        while not self._started.wait(0.2):
            self._raise_failure()
            if time.monotonic() > deadline + slack:
                missing = [rank for rank in range(self.spec.size) if rank not in self._arrived]
                raise errors.CollectiveTimeoutError(
                    f"{name_ranks(missing)} did not start within {self._timeout:g} s: {len(self._arrived)} of "
                    f"{self.spec.size} ranks arrived at {self._rendezvous.url}. Usual causes: a process failed or "
                    "hangs before `tfdist.init()` (look at its output), it was started with another rendezvous, or "
                    "it is only slow: raise `tfdist.init(timeout=...)`."
                )
        self._raise_failure()

    def close(self, *, error: str | None = None) -> None:
        """Orderly goodbye: peers do not take this rank's end for a failure. Idempotent, bounded by about 5 s.

        Rank 0 goes on serving until the others said goodbye too, for at most 3 s.

        Args:
            error: why this rank ends early; peers then fail at once with this text.
        """
        with self._state_lock:
            if self._closing:
                return
            self._closing = True
        self._fail_pending(errors.NotInitializedError(self._closed_text))
        if self._line is not None:
            if self._thread is not None and self._thread.is_alive():
                header = {"type": "goodbye", "error": error}
                if self._send_lock.acquire(timeout=_GOODBYE_PATIENCE):
                    try:
                        with contextlib.suppress(OSError):
                            self._line.send(header)
                    finally:
                        self._send_lock.release()
                if self._thread is not threading.current_thread():
                    self._thread.join(_GOODBYE_PATIENCE)
                    if self._thread.is_alive():
                        self._line.hang_up()
                        self._thread.join(_GOODBYE_PATIENCE)
            self._closed = True
            self._line.close()
        if self._server is not None:
            self._server.stop(_SERVER_LINGER)
            if self._published and self._rendezvous.file is not None:
                meeting.withdraw(self._rendezvous.file, self._instance)

    _closed_text = "The control channel is closed: `tfdist.shutdown()` was called. Call `tfdist.init()` first."

    # Agreement.

    def exchange(
        self,
        key: str,
        payload: Any,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        check: Any = None,
        describe: str | None = None,
    ) -> list[Any]:
        """Blocks until every rank of `ranks` called with the same `key`; returns their payloads in that order.

        Every rank of `ranks` must call it. A key may be used again: a rank's k-th call meets the k-th calls of the
        others. Moves each payload once to rank 0 and from there to every other rank of the group.

        Args:
            key: identifies the meeting.
            payload: JSON values and bytes, at most 256 MiB; tuples arrive as lists.
            ranks: ascending world ranks, equal on all of them; all ranks by default.
            timeout: bound in seconds; that of `connect` by default.
            check: must be equal on all ranks; a readable string, for it is shown in the error.
            describe: the operation's name in errors; by default `exchange 'key'`.

        Raises:
            CollectiveTimeoutError: a rank did not come; names it and tells what it does.
            CollectiveMismatchError: `check` differs; on every rank of the group. Later exchanges work.
            PeerLostError: a rank of the world is gone.
        """
        operation = describe or f"exchange {key!r}"
        bound = self._timeout if timeout is None else timeout
        encoded = Part.of(encode_payload(payload))
        group = None if ranks is None else list(ranks)
        if group is not None and (self.spec.rank not in group or sorted(set(group)) != group or group[-1] >= self.spec.size or group[0] < 0):
            raise ValueError(
                f"{operation} on rank {self.spec.rank}: ranks must be ascending, without repetition, within "
                f"0..{self.spec.size - 1}, and contain the calling rank; got {group}."
            )
        header = {
            "type": "exchange",
            "key": key,
            "ranks": group,
            "timeout": bound,
            "check": _canonical(check),
            "operation": operation,
        }
        with self.section(operation):
            frame = self._request(header, [encoded], bound=bound, operation=operation)
        payloads = [decode_payload(part.data) for part in frame.parts]
        members = group if group is not None else range(self.spec.size)
        payloads.insert(list(members).index(self.spec.rank), decode_payload(encoded.data))
        return payloads

    def announce(self, key: str, payload: Any) -> None:
        """Posts without waiting; when two ranks announce different payloads for `key`, all ranks fail.

        The i-th distinct payloads of any two ranks under a key must be equal. Since ranks may trace their
        functions in another order, a difference counts only if the ranks' sets of payloads have not become equal
        after the grace period of `connect` (5 s); then `failure` is a CollectiveMismatchError on all ranks.

        Raises:
            TfdistError: the world has failed already.
        """
        self._raise_failure()
        self._send({"type": "announce", "key": key, "signature": _canonical(payload) or "null"})

    def allocate(self, key: str, count: int = 1) -> int:
        """First of `count` consecutive integers reserved for `key`, equal on all ranks; never waits for peers.

        Integers start at 1 and no two keys share one. Only rank 0's server is asked, and only once per key.

        Raises:
            CollectiveMismatchError: another rank reserved a different count under this key.
        """
        if count < 1:
            raise ValueError(f"allocate({key!r}): count must be at least 1, got {count}.")
        cached = self._allocated.get((key, count))
        if cached is not None:
            return cached
        header = {"type": "allocate", "key": key, "count": count}
        frame = self._request(header, (), bound=self._silence, operation=f"allocate {key!r}")
        first = int(frame.header["first"])
        self._allocated[key, count] = first
        return first

    # What this rank does, and what the others do.

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator[None]:
        """Marks what this rank is in, for the diagnosis that peers print; costs no message."""
        number = next(self._numbers)
        self._sections[number] = (what, time.monotonic())
        try:
            yield
        finally:
            del self._sections[number]
            self._left = (what, time.monotonic())

    def status(self) -> list[RankStatus]:
        """What every rank does now, in rank order; ranks that do not answer within 0.5 s show older news."""
        frame = self._request({"type": "inquire"}, (), bound=5.0, operation="status")
        return [RankStatus.from_json(record) for record in frame.header["ranks"]]

    def diagnose(self, waiting_for: str, ranks: Sequence[int] | None = None) -> str:
        """Text: which ranks are missing from `waiting_for`, what each last entered, since when, on which host.

        Args:
            waiting_for: name of a `section`.
            ranks: who should be in it; all ranks by default.
        """
        group = list(range(self.spec.size)) if ranks is None else list(ranks)
        if self._failure is not None:
            return str(self._failure)
        try:
            statuses = self.status()
        except errors.TfdistError as error:
            return f"waiting for {waiting_for!r}: what the other ranks do is unknown, because {error}"
        return explain_missing(
            statuses, waiting_for=waiting_for, ranks=group, missing=guess_missing(statuses, waiting_for, group)
        )

    # Failure.

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Registers what is called once, in the control thread, when a peer is lost or announcements differ.

        If the world has failed already, `callback` is called at once, in the calling thread.
        """
        with self._state_lock:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    @property
    def failure(self) -> Exception | None:
        """The first failure seen, if any."""
        return self._failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._closing:
            raise errors.NotInitializedError(self._closed_text)
        if self._server_left:
            raise errors.PeerLostError(
                "Rank 0 has left the world by `tfdist.shutdown()` or a regular end, and the control channel with it. "
                "Every rank must call the same collectives before it ends."
            )

    def _fail(self, failure: errors.TfdistError) -> None:
        with self._state_lock:
            if self._failure is not None or self._closing:
                return
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
        self._fail_pending(failure)
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:
                _log.exception("a callback for the failure of the world failed itself")

    def _fail_pending(self, error: Exception) -> None:
        for number in list(self._pending):
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending.error = error
                pending.done.set()

    # Requests.

    def _request(self, header: dict[str, Any], parts: Sequence[Part], *, bound: float, operation: str) -> Frame:
        number = next(self._numbers)
        pending = self._pending[number] = _Pending()
        try:
            self._raise_failure()
            self._send({**header, "id": number}, parts)
            if not pending.done.wait(bound + _SLACK):
                raise errors.CollectiveTimeoutError(
                    f"{operation!r} on rank {self.spec.rank}: the control server in rank 0's process did not answer "
                    f"within {bound + _SLACK:g} s. That process is stopped or busy; look at rank 0's output."
                )
        finally:
            self._pending.pop(number, None)
        if pending.error is not None:
            raise type(pending.error)(*pending.error.args)
        assert pending.frame is not None
        return pending.frame

    def _send(self, header: dict[str, Any], parts: Sequence[Part] = ()) -> None:
        assert self._line is not None
        with self._send_lock:
            try:
                self._line.send(header, parts)
            except OSError:
                pass  # the control thread sees the same broken connection and reports it
            except BaseException:
                self._line.hang_up()  # half a message may be out, nothing can follow it
                raise

    # The control thread.

    def _run(self) -> None:
        assert self._line is not None
        heard = beat = time.monotonic()
        try:
            while True:
                begin = time.monotonic()
                wait = max(beat - begin, 0.0)
                if self._line.read(wait):
                    heard = time.monotonic()
                    for frame in self._line.take_frames():
                        if not self._handle(frame):
                            return
                now = time.monotonic()
                if now - begin - wait > _STALL:
                    heard += now - begin - wait  # this process was stopped or busy, not the server
                if now >= beat:
                    self._tell_sections({"type": "heartbeat"})
                    beat = now + HEARTBEAT
                if now - heard > self._silence:
                    self._lose_server(
                        f"nothing came from it for {now - heard:.0f} s though the connection is open, so its process "
                        "is stopped, its host vanished, or its interpreter is blocked"
                    )
                    self._line.hang_up()
                    return
        except (EOFError, OSError):
            self._lose_server("its connection ended without goodbye, so its process ended or was killed")
        except ProtocolViolation as error:
            self._lose_server(f"it sent an invalid message ({error})")
            self._line.hang_up()

    def _lose_server(self, reason: str) -> None:
        if self._closing or self._server_left:
            return
        host, pid = self._server_identity
        self._fail(
            errors.PeerLostError(
                f"Rank 0 (host {host}, pid {pid}) is gone: {reason}. Look at its output for its first error."
            )
        )

    _server_identity: tuple[str, int] = ("unknown", 0)

    def _handle(self, frame: Frame) -> bool:
        """Acts on one message; False ends the thread."""
        kind = frame.header["type"]
        if kind in ("result", "allocated", "statuses", "error"):
            pending = self._pending.pop(frame.header["id"], None)
            if pending is not None:
                if kind == "error":
                    pending.error = revive(frame.header["error"], frame.header["message"])
                pending.frame = frame
                pending.done.set()
        elif kind == "question":
            self._tell_sections({"type": "status", "inquiry": frame.header["inquiry"]})
        elif kind == "beat":
            if frame.header["arrived"] is not None:
                self._arrived = frame.header["arrived"]
        elif kind == "start":
            self.roster = [decode_payload(part.data) for part in frame.parts]
            self._started.set()
        elif kind == "failure":
            self._fail(revive(frame.header["error"], frame.header["message"]))
        elif kind == "closing":
            self._server_left = True
            try:
                self._raise_failure()
            except errors.TfdistError as error:
                self._fail_pending(error)
        elif kind == "bye":
            return False
        return True

    def _tell_sections(self, header: dict[str, Any]) -> None:
        now = time.monotonic()
        header["inside"] = [(what, now - since) for what, since in tuple(self._sections.values())]
        left = self._left
        header["left"] = None if left is None else (left[0], now - left[1])
        assert self._line is not None
        # If another thread is in the middle of a large message, that is sign of life enough.
        if self._send_lock.acquire(timeout=0.2):
            try:
                self._line.send(header)
            finally:
                self._send_lock.release()


def _canonical(value: Any) -> str | None:
    """Text of a value that ranks compare; strings are shown as they are."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)
