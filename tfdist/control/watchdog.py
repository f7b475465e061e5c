"""Bounds waits inside an engine that has no bound of its own.

A rank waits inside the engine, in a graph, where no Python code runs. The engines' own bounds don't serve:
Horovod's stall shutdown never fired when measured (0.28.1, Gloo, stalls of four times its setting), and
TensorFlow's `timeout_seconds` keeps two threads per collective asleep until it passes. So a thread looks at what
this rank is in; once that has lasted longer than the world's bound, it asks what the other ranks are in. If one of
them is somewhere else, this is a stall. A step may rightly take long on all ranks; only after several times the
bound it is taken for a stall, too: they may wait for different collectives inside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tfdist.control.diagnosis import explain_missing, guess_missing
from tfdist.control.plane import ControlPlane
from tfdist.errors import CollectiveTimeoutError, TfdistError

_PATIENCE = 6


@dataclasses.dataclass(frozen=True)
class _Wait:
    """Something this rank is in: the section's name, since when, the open section, who belongs there, whether to
    print a stall.
    """

    label: str
    since: float
    section: contextlib.ExitStack
    ranks: Sequence[int]
    printing: bool


class Watchdog:
    """Ends this rank's wait when another rank does not come.

    Args:
        control: channel to the other ranks.
        abort: makes the engine's pending collectives fail.
        timeout: bound in seconds.
    """

    def __init__(self, control: ControlPlane, abort: Callable[[Exception], None], *, timeout: float) -> None:
        self._control = control
        self._abort = abort
        self._timeout = timeout
        self._inside: dict[str, _Wait] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: CollectiveTimeoutError | None = None

    @contextlib.contextmanager
    def watch(self, what: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
        """Marks that this rank is in `what`, where all of `ranks`, by default every rank, must come in time."""
        self._enter(what, what, ranks, printing=False)
        try:
            yield
        finally:
            self.leave(what)

    def enter_again(self, what: str, ranks: Sequence[int] | None = None) -> None:
        """Enters what is entered many times; the k-th times of `ranks` belong together. `leave` ends it.

        No Python code of tfdist stands around it to explain the engine's error, so a stall is also printed.
        """
        count = self._counts[what] = self._counts.get(what, 0) + 1
        self._enter(what, f"{what}, time {count}", ranks, printing=True)

    def leave(self, what: str) -> None:
        """Stops the clock of `what`; others, in flight at the same time, go on."""
        with self._lock:
            wait = self._inside.pop(what, None)
        if wait is not None:
            wait.section.close()

    @property
    def watching(self) -> bool:
        """Whether this rank is in something that is watched."""
        return bool(self._inside)

    def _enter(self, what: str, label: str, ranks: Sequence[int] | None, *, printing: bool) -> None:
        section = contextlib.ExitStack()
        section.enter_context(self._control.section(label))
        with self._lock:
            before = self._inside.get(what)
            expected = range(self._control.spec.size) if ranks is None else ranks
            self._inside[what] = _Wait(label, time.monotonic(), section, expected, printing)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tfdist-watchdog", daemon=True)
                self._thread.start()
        if before is not None:
            before.section.close()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout / 10)) and self.error is None:
            with self._lock:
                waits = list(self._inside.items())
            for what, wait in waits:
                if time.monotonic() - wait.since > self._timeout and self.error is None:
                    self._examine(what, wait)

    def _examine(self, what: str, wait: _Wait) -> None:
        try:
            statuses = self._control.status()
        except TfdistError:
            return  # the channel has failed, and tells everybody itself
        missing = guess_missing(statuses, wait.label, wait.ranks)
        waited = time.monotonic() - wait.since
        if self._inside.get(what) is not wait or (not missing and waited < _PATIENCE * self._timeout):
            return
        text = explain_missing(
            statuses, waiting_for=wait.label, ranks=wait.ranks, missing=missing, waited=self._timeout
        )
        if not missing:
            text = (
                f"All ranks have been in {wait.label!r} for {waited:.0f} s, {_PATIENCE} times the bound. They wait "
                "for different collectives in it, or it is only slow. Make all ranks run the same operations in "
                "the same number, or raise `tfdist.init(timeout=...)`."
            )
        self.error = CollectiveTimeoutError(text)
        if wait.printing:
            print(f"tfdist: {text}", file=sys.stderr, flush=True)
        self._abort(self.error)
