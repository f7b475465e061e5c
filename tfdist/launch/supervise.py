"""The one place that starts and ends processes.

Every rank leads a session and process group of its own, so that its children end with it. Ranks that have
ended stay unreaped until the run is over: their process ids cannot be given to somebody else meanwhile, and
the groups can be signalled without a race. Two things end a run whose launcher is killed: each rank is tied
to the launcher by the kernel (`tie.py`), and a guardian ends their children (`guardian.py`).

Who failed first is told apart from who failed because of it by the time at which a rank began to print its
last traceback, or else ended: a rank may need a second to unload TensorFlow after its traceback, and its
peers may notice and end before it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO

from tfdist.launch import guardian
from tfdist.launch.output import Channel, Memory
from tfdist.launch.plan import LocalPlan, RankCommand

# Together below the 5 seconds within which a failed run has to be over.
_GRACE = 1.0  # seconds for the rank that failed first to end, when one that failed because of it was quicker
_EXPLANATION = 2.0  # seconds for rank 0 to say what the end of one that served it means
_TERM = 2.0  # seconds between SIGTERM and SIGKILL
_LEFTOVERS = 0.5  # seconds between SIGTERM and SIGKILL for what ranks started and left behind
_DRAIN = 0.5  # seconds for output that is still in the pipes after every process ended

_NEVER = float("inf")
_HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        status: exit code, or minus the signal that ended it.
        at: monotonic time in seconds.
    """

    status: int
    at: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: exit code for the launcher: 0, the first failing rank's, or 128 + signal.
        failed: the rank that failed first, None when none did.
        signal: the signal that interrupted the launcher, 0 when none did.
        ends: how each rank ended.
        memories: what each rank wrote last.
    """

    code: int
    failed: int | None
    signal: int
    ends: Mapping[int, End]
    memories: Mapping[int, Memory]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How one rank's output reaches the user.

    Attributes:
        stdout: takes the rank's standard output.
        stderr: takes its standard error; the same object as `stdout` when both go to one place.
        stdout_terminal: descriptor of the terminal that the rank's standard output should look like, or None.
        stderr_terminal: the same for standard error.
        stdin: whether the rank reads the launcher's standard input.
    """

    stdout: Channel
    stderr: Channel
    stdout_terminal: int | None = None
    stderr_terminal: int | None = None
    stdin: bool = False


def run_local(
    plan: LocalPlan,
    wire: Callable[[int], Wiring],
    *,
    environ: Mapping[str, str],
    folder: str,
    take_signals: bool = True,
) -> Outcome:
    """Runs a world on this machine to its end; when it returns or raises, no process of it is left.

    Args:
        plan: what to start.
        wire: gives each rank's output its way.
        environ: the launcher's environment, which ranks inherit.
        folder: the run's private folder; removed by the guardian if this process is killed.
        take_signals: whether SIGINT, SIGTERM and SIGHUP end the run with an outcome, as a command line wants;
            otherwise they act as elsewhere in Python, and KeyboardInterrupt ends the run on its way out.

    Returns:
        How it ended.
    """
    return _Run(plan, wire, environ, folder).to_its_end(take_signals=take_signals)


class _Run:
    def __init__(
        self, plan: LocalPlan, wire: Callable[[int], Wiring], environ: Mapping[str, str], folder: str
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._environ = {name: value for name, value in environ.items() if name not in plan.dropped}
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: dict[int, End] = {}
        self._memories = {command.rank: Memory() for command in plan.ranks}
        self._selector = selectors.DefaultSelector()
        self._sources: dict[int, tuple[Channel, Memory | None]] = {}
        self._terminals: list[tuple[int, int]] = []  # pseudo-terminal, and the terminal whose size it follows
        self._wake_read, self._wake_write = os.pipe()
        self._signals: list[int] = []
        self._interrupted = 0
        self._stopped_at = _NEVER
        self._kill_at = _NEVER
        self._watchers: list[threading.Thread] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def to_its_end(self, *, take_signals: bool) -> Outcome:
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        with self._handlers() if take_signals else contextlib.nullcontext():
            try:
                self._start_guardian()
                for command in self._plan.ranks:
                    self._start(command)
                while len(self._ends) < len(self._processes):
                    self._step()
            finally:
                self._end_everything()
        failed = self._first_failure()
        code = 0
        if self._interrupted:
            code = 128 + self._interrupted
        elif failed is not None:
            if self._died_too_slowly(failed):
                # The code that Python would have ended with, not that of the signal which cut its end short.
                self._ends[failed] = End(1, self._ends[failed].at)
            status = self._ends[failed].status
            code = status if status > 0 else 128 - status
        return Outcome(code, failed, self._interrupted, self._ends, self._memories)

    # Starting

    def _start_guardian(self) -> None:
        script = str(_HERE / "guardian.py")
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(os.getpid()), self._plan.job, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A world around this one must not take the guardian for one of its own processes.
            env={name: value for name, value in os.environ.items() if name != "TFDIST_JOB"},
            cwd="/",
            start_new_session=True,
        )

    def _tell_guardian(self, text: str) -> None:
        assert self._guardian is not None
        assert self._guardian.stdin is not None
        with contextlib.suppress(OSError):  # killed by somebody; the ranks are still tied to this process
            self._guardian.stdin.write(text.encode() + b"\n")
            self._guardian.stdin.flush()

    def _start(self, command: RankCommand) -> None:
        wiring = self._wire(command.rank)
        memory = self._memories[command.rank]
        out, out_end = self._open_end(wiring.stdout_terminal)
        merged = wiring.stdout is wiring.stderr
        err, err_end = (out, out_end) if merged else self._open_end(wiring.stderr_terminal)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HERE / "tie.py"), str(os.getpid()), *command.argv],
                stdin=None if wiring.stdin else subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                env={**self._environ, **command.variables},
                start_new_session=True,
            )
        finally:
            for descriptor in {out_end, err_end}:
                os.close(descriptor)
            self._listen(out, wiring.stdout, memory if merged else None)
            if not merged:
                self._listen(err, wiring.stderr, memory)
        self._processes[command.rank] = process
        self._tell_guardian(str(process.pid))
        watcher = threading.Thread(target=self._await_end, args=(command.rank, process.pid), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _open_end(self, terminal: int | None) -> tuple[int, int]:
        """A pipe, or a pseudo-terminal of the same size as `terminal`: (our end, the rank's end)."""
        if terminal is None:
            return os.pipe()
        ours, theirs = os.openpty()
        modes = termios.tcgetattr(theirs)
        modes[1] &= ~termios.OPOST  # the real terminal makes \r\n of \n, once
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self._terminals.append((ours, terminal))
        self._copy_size(ours, terminal)
        return ours, theirs

    @staticmethod
    def _copy_size(ours: int, terminal: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(ours, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))

    def _listen(self, descriptor: int, channel: Channel, memory: Memory | None) -> None:
        os.set_blocking(descriptor, False)
        self._sources[descriptor] = (channel, memory)
        self._selector.register(descriptor, selectors.EVENT_READ)

    def _await_end(self, rank: int, process: int) -> None:
        """In a thread of its own per rank, so that the order of ends is kept while output is being shown."""
        with contextlib.suppress(ChildProcessError):
            # WNOWAIT: the process id stays taken until the whole run is over.
            result = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
            assert result is not None
            status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            self._ends[rank] = End(status, time.monotonic())
        self._ends.setdefault(rank, End(1, time.monotonic()))
        self._wake()

    # Watching

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self._signals.append(number)
            self._wake()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH)
        # What the user had ignored (nohup, a background job of a script) stays ignored.
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _step(self) -> None:
        deadline = self._stopped_at if self._kill_at == _NEVER else self._kill_at
        self._pump(timeout=max(0.0, deadline - time.monotonic()))
        while self._signals:
            self._take_signal(self._signals.pop(0))
        failures = [rank for rank in list(self._ends) if self._has_failed(rank)]
        now = time.monotonic()
        if failures and self._kill_at == _NEVER:
            while self._pump(timeout=0):
                pass
            grace = _GRACE if self._culprit_may_follow(failures) else 0.0
            if self._plan.expendable and 0 not in self._ends:
                grace = _EXPLANATION  # rank 0 knows what the loss of a server means
            self._stopped_at = min(self._stopped_at, now + grace)
        if now >= self._stopped_at and self._kill_at == _NEVER:
            self._signal_ranks(signal.SIGTERM)
            self._kill_at = now + _TERM
        if now >= self._kill_at:
            self._signal_ranks(signal.SIGKILL)
            self._kill_at = now + _TERM

    def _pump(self, *, timeout: float) -> bool:
        """Shows what arrived within `timeout`; returns whether anything did."""
        moved = False
        for key, _ in self._selector.select(None if timeout == _NEVER else timeout):
            if key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                continue
            moved = True
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:  # a pseudo-terminal says EIO when its other end is closed
                data = b""
            channel, memory = self._sources[key.fd]
            if data:
                if memory:
                    memory.feed(data)
                channel.feed(data)
            else:
                self._hang_up(key.fd)
        return moved

    def _pump_while(self, condition: Callable[[], bool], *, bound: float) -> None:
        deadline = time.monotonic() + bound
        while condition() and time.monotonic() < deadline:
            self._pump(timeout=0.02)

    def _hang_up(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        channel, _ = self._sources.pop(descriptor)
        self._terminals = [pair for pair in self._terminals if pair[0] != descriptor]
        os.close(descriptor)
        channel.close()

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGWINCH:
            for pair in self._terminals:
                self._copy_size(*pair)
            return
        now = time.monotonic()
        if self._stopped_at <= now:
            self._kill_at = now  # asked twice, or while the ranks were being ended anyway
        else:
            self._interrupted = number
            self._signal_ranks(number)  # lets scripts handle it; who does not end gets SIGKILL
            self._stopped_at, self._kill_at = now, now + _TERM

    def _signal_ranks(self, number: int) -> None:
        groups = [process.pid for rank, process in self._processes.items() if rank not in self._ends]
        guardian.signal_groups(groups, number)

    # Judging and ending

    def _has_failed(self, rank: int) -> bool:
        """Whether a rank has ended as none may: an expendable one may be ended by a signal."""
        status = self._ends[rank].status
        return status != 0 and not (status < 0 and rank in self._plan.expendable)

    def _failed_at(self, rank: int) -> float:
        end, began = self._ends[rank], self._memories[rank].traceback_at
        return min(end.at, began) if end.status > 0 and began is not None else end.at

    def _culprit_may_follow(self, failures: list[int]) -> bool:
        """Whether a rank that still runs may have failed before those that ended."""
        running = [rank for rank in self._processes if rank not in self._ends]
        first = min(self._failed_at(rank) for rank in failures)
        began = [self._memories[rank].traceback_at for rank in running]
        only_consequences = all(self._memories[rank].is_consequence() for rank in failures)
        return bool(running) and (only_consequences or any(at is not None and at < first for at in began))

    def _first_failure(self) -> int | None:
        """The rank that failed by itself before all others; those that tfdist ended have not failed."""
        failures = [
            rank
            for rank, end in self._ends.items()
            if self._has_failed(rank)
            and (end.at < self._stopped_at or self._failed_at(rank) < self._stopped_at)
        ]
        if self._interrupted and not failures:
            return None
        consequences = {rank for rank in failures if self._memories[rank].is_consequence()}
        if failures and len(consequences) == len(failures):
            failures += [rank for rank in self._ends if rank not in failures and self._died_too_slowly(rank)]
        order = {rank: (rank in consequences, self._failed_at(rank)) for rank in failures}
        return min(failures, key=order.__getitem__, default=None)

    def _died_too_slowly(self, rank: int) -> bool:
        """Whether a rank that tfdist ended had printed the traceback of its own end before.

        Unloading TensorFlow can outlast the grace period on a busy machine. It is asked only when all others
        failed because some rank was lost; a traceback alone may also have been caught and printed.
        """
        end, memory = self._ends[rank], self._memories[rank]
        began = memory.traceback_at
        ended_by_us = end.status < 0 and end.at >= self._stopped_at
        return ended_by_us and began is not None and began < self._stopped_at and not memory.is_consequence()

    def _end_everything(self) -> None:
        groups = [process.pid for process in self._processes.values()]
        if len(self._ends) < len(groups):  # an exception is on its way out
            guardian.signal_groups(groups, signal.SIGTERM)
            self._pump_while(lambda: len(self._ends) < len(groups), bound=_TERM)
        if guardian.processes_of(self._plan.job):  # children that outlived their rank
            guardian.signal_groups(groups, signal.SIGTERM)
            self._pump_while(lambda: bool(guardian.processes_of(self._plan.job)), bound=_LEFTOVERS)
        guardian.kill_everything(groups, self._plan.job)
        self._pump_while(lambda: bool(self._sources), bound=_DRAIN)
        for descriptor in list(self._sources):
            self._hang_up(descriptor)
        for watcher in self._watchers:
            watcher.join()
        for process in self._processes.values():
            process.wait()
        if self._guardian is not None:
            self._tell_guardian("done")
            stdin: IO[bytes] | None = self._guardian.stdin
            if stdin is not None:
                with contextlib.suppress(OSError):
                    stdin.close()
            self._guardian.wait()
        self._selector.close()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)
