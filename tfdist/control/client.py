"""A rank's conversation with the control server: requests, heartbeats, and the first failure.

One thread reads; callers send from their own threads and wait for their answer. What this rank is in is kept
in fields that the next heartbeat, or the server's question, carries: entering a section costs no message.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist import errors
from tfdist.control.dialing import revive
from tfdist.control.frames import Frame, Part, ProtocolViolation
from tfdist.control.line import Line
from tfdist.control.loop import STALL
from tfdist.control.payloads import decode_payload
from tfdist.control.server import HEARTBEAT

_SLACK = 10.0  # how much longer than the server a client waits before it stops believing in the server
_GOODBYE_PATIENCE = 2.0
_CLOSED = "The control channel is closed: `tfdist.shutdown()` was called. Call `tfdist.init()` first."
_SERVER_LEFT = (
    "Rank 0 has left the world by `tfdist.shutdown()` or a regular end, and the control channel with it. "
    "Every rank must call the same collectives before it ends."
)

_log = logging.getLogger(__name__)


class _Request:
    """A message that waits for its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: Frame | None = None
        self.error: Exception | None = None


class ControlClient:
    """See the module docstring.

    Args:
        line: connection on which the server has said welcome.
        server: the server's process, for messages.
        rank: this rank.
        silence: after how many seconds without a byte the server counts as lost.

    Attributes:
        started: set once the start is over, in success or failure.
        roster: every rank's hello, once started.
        arrived: ranks that have arrived, during the start.
        failure: the first one.
        lost: what is known of expendable ranks that are gone, by rank.
    """

    def __init__(self, line: Line, *, server: str, rank: int, silence: float) -> None:
        self.started = threading.Event()
        self.roster: list[dict[str, Any]] = []
        self.arrived: list[int] = [0]
        self.failure: errors.TfdistError | None = None
        self.lost: dict[int, str] = {}
        self._line = line
        self._server = server
        self._rank = rank
        self._silence = silence
        self._send_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._sections: dict[int, tuple[str, float]] = {}
        self._left: tuple[str, float] | None = None
        self._callbacks: list[Callable[[Exception], None]] = []
        self._closing = False
        self._server_left = False
        self._thread = threading.Thread(target=self._run, name="tfdist-control-client", daemon=True)
        self._thread.start()

    # Sections.

    def enter(self, what: str) -> int:
        """Notes that this rank is in `what`; returns what `leave` wants."""
        number = next(self._numbers)
        self._sections[number] = (what, time.monotonic())
        return number

    def leave(self, number: int) -> None:
        what, _ = self._sections.pop(number)
        self._left = (what, time.monotonic())

    # Sending.

    def request(
        self, header: dict[str, Any], parts: Sequence[Part] = (), *, bound: float, operation: str
    ) -> Frame:
        """Sends a message and waits for the answer; the server keeps the bound, this side a looser one."""
        number = next(self._numbers)
        request = self._requests[number] = _Request()
        try:
            self.raise_failure()  # after registering: a failure from now on ends the wait
            self.send({**header, "id": number}, parts)
            if not request.done.wait(bound + _SLACK):
                raise errors.CollectiveTimeoutError(
                    f"{operation!r} on rank {self._rank}: the control server in rank 0's process did not "
                    f"answer within {bound + _SLACK:g} s. {self._server} is stopped or busy; look at its "
                    "output."
                )
        finally:
            self._requests.pop(number, None)
        if request.error is not None:
            raise _copy(request.error)
        assert request.answer is not None
        return request.answer

    def send(self, header: dict[str, Any], parts: Sequence[Part] = ()) -> None:
        """Sends a message that has no answer."""
        with self._send_lock:
            try:
                self._line.send(header, parts)
            except OSError:
                pass  # the control thread sees the same broken connection and reports it
            except ValueError:
                raise  # nothing was sent
            except BaseException:
                self._line.hang_up()  # Ctrl-C: half a message may be out, so nothing can follow it
                raise

    def close(self, error: str | None, *, linger: float = 0.0) -> None:
        """Says goodbye, waits for the answer, closes. Idempotent.

        Args:
            error: why this rank ends early.
            linger: how many seconds the other ranks have to say goodbye, too, before this one hangs up.
        """
        with self._state_lock:
            if self._closing:
                return
            self._closing = True
        self._fail_requests(errors.NotInitializedError(_CLOSED))
        if self._thread.is_alive():
            self._tell_sections({"type": "heartbeat"})  # those who wait for this rank hear how far it came
        # Another thread may be stuck in a large message; then only hanging up helps.
        if self._thread.is_alive() and self._send_lock.acquire(timeout=_GOODBYE_PATIENCE):
            try:
                self._line.send({"type": "goodbye", "error": error, "linger": linger > 0})
            except OSError:
                pass
            finally:
                self._send_lock.release()
        if self._thread is not threading.current_thread():
            self._thread.join(max(linger, _GOODBYE_PATIENCE))
            if self._thread.is_alive():
                self._line.hang_up()
                self._thread.join(_GOODBYE_PATIENCE)
        self._line.close()

    def wait_for_end(self) -> None:
        """Blocks until the conversation is over: the world has failed, or rank 0 has left it."""
        while not (self.failure or self._server_left) and self._thread.is_alive():
            self._thread.join(0.1)

    # Failure.

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Calls `callback` at the first failure, or at once if there was one."""
        with self._state_lock:
            failure = self.failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def raise_failure(self) -> None:
        """Raises if nothing can be agreed any more."""
        if self._closing:
            raise errors.NotInitializedError(_CLOSED)
        if self.failure is not None:
            raise _copy(self.failure)
        if self._server_left:
            raise errors.PeerLostError(_SERVER_LEFT)

    def _fail(self, failure: errors.TfdistError) -> None:
        with self._state_lock:
            if self.failure is not None or self._closing or self._server_left:
                return
            self.failure = failure
            callbacks, self._callbacks = self._callbacks, []
        self.started.set()
        self._fail_requests(failure)
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:
                _log.exception("a callback for the failure of the world failed itself")

    def _fail_requests(self, error: Exception) -> None:
        for number in list(self._requests):
            request = self._requests.pop(number, None)
            if request is not None:
                request.error = error
                request.done.set()

    # The control thread.

    def _run(self) -> None:
        try:
            self._converse()
        except (EOFError, OSError):
            self._lose_server("its connection ended without goodbye, so its process ended or was killed")
        except (ProtocolViolation, LookupError, TypeError, ValueError) as error:
            self._lose_server(f"it sent an invalid message ({error!r})")
        self._line.hang_up()

    def _converse(self) -> None:
        heard = beat = looked = time.monotonic()
        while True:
            wait = max(beat - time.monotonic(), 0.0)
            if self._line.read(wait):
                heard = time.monotonic()
                for frame in self._line.take_frames():
                    if not self._handle(frame):
                        return
            now = time.monotonic()
            pause, looked = now - looked - wait, now
            if pause > STALL:
                heard += pause  # this process was stopped or busy, not the server
            if now >= beat:
                self._tell_sections({"type": "heartbeat"})
                beat = now + HEARTBEAT
            if now - heard > self._silence:
                self._lose_server(
                    f"nothing came from it for {now - heard:.0f} s though the connection is open, so its "
                    "process is stopped, its host vanished, or its interpreter is blocked"
                )
                return

    def _handle(self, frame: Frame) -> bool:
        """Acts on one message; False ends the conversation."""
        header = frame.header
        kind = header["type"]
        if kind in ("result", "allocated", "statuses", "error"):
            request = self._requests.pop(header["id"], None)
            if request is not None:
                request.answer = frame
                request.error = revive(header["error"], header["message"]) if kind == "error" else None
                request.done.set()
        elif kind == "question":
            self._tell_sections({"type": "status", "inquiry": header["inquiry"]})
        elif kind == "beat":
            self.arrived = header["arrived"] or self.arrived
        elif kind == "start":
            self.roster = [decode_payload(part.data) for part in frame.parts]
            self.started.set()
        elif kind == "lost":
            self.lost[header["rank"]] = header["message"]
        elif kind == "failure":
            self._fail(revive(header["error"], header["message"]))
        elif kind == "closing":
            self._server_left = True
            self._fail_requests(self.failure or errors.PeerLostError(_SERVER_LEFT))
            return False
        elif kind == "bye":
            return False
        return True

    def _tell_sections(self, header: dict[str, Any]) -> None:
        now = time.monotonic()
        left = self._left
        header["inside"] = [(what, now - since) for what, since in tuple(self._sections.values())]
        header["left"] = None if left is None else (left[0], now - left[1])
        # If another thread is in the middle of a large message, that is sign of life enough.
        if self._send_lock.acquire(timeout=0.2):
            try:
                self._line.send(header)
            except OSError:
                pass  # what the server sent last may still be unread, and tells more than a broken connection
            finally:
                self._send_lock.release()

    def _lose_server(self, reason: str) -> None:
        self._fail(
            errors.PeerLostError(f"{self._server} is gone: {reason}. Look at its output for its first error.")
        )


def _copy(error: Exception) -> Exception:
    """A fresh instance for each thread that raises it: a shared one would collect their tracebacks."""
    return type(error)(*error.args)
