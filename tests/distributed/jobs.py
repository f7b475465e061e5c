"""Whole jobs as users start them: commands that run to their end, several at a time, and leave nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import pytest

from tests.source_tree import search_path

SCRIPTS = Path(__file__).parent / "launch_scripts"
BOUND = 150.0  # seconds; nothing here waits that long unless it hangs
AT_ONCE = 2  # jobs that run at the same time: most of one is waiting for imports and time-outs
_MARK = "TESTED_JOB"  # in the environment of every process of a job
_FOREIGN = ("TFDIST_", "HOROVOD_", "OMPI_", "PMI", "PRTE_", "SLURM_", "TF_CONFIG")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ended:
    """What is left of a job.

    Attributes:
        codes: exit codes of its commands; minus the signal for those that one ended.
        outputs: what each command printed.
        orphans: command lines of processes that outlived the job.
        seconds: how long it ran.
    """

    codes: list[int]
    outputs: list[str]
    orphans: list[str]
    seconds: float

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    def summary(self) -> str:
        """What `tfdist run` said at the end."""
        return self.output.partition("\ntfdist run:")[2]


def records_in(output: str) -> list[dict[str, Any]]:
    """The ranks' JSON lines, whatever a launcher put before them, by rank."""
    found = [json.loads(text) for text in re.findall(r'\{"rank": .*\}', output)]
    return sorted(found, key=lambda record: int(record["rank"]))


class Running:
    """A started job.

    Args:
        commands: started together, each in a session of its own.
        variables: further environment, one mapping per command.
    """

    def __init__(self, commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> None:
        self.mark = secrets.token_hex(8)
        self._start = time.monotonic()
        self._files = [tempfile.TemporaryFile() for _ in commands]  # noqa: SIM115  # closed by `end`
        self.processes: list[subprocess.Popen[bytes]] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        inherited |= {
            _MARK: self.mark,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": search_path(),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        try:
            for command, file, extra in zip(commands, self._files, variables, strict=True):
                process = subprocess.Popen(
                    command,
                    env=inherited | dict(extra),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.processes.append(process)
        except BaseException:
            self.end()
            raise

    def output(self, number: int = 0) -> str:
        """What a command has printed until now."""
        with open(self._files[number].fileno(), "rb", closefd=False, buffering=0) as file:
            return os.pread(file.fileno(), 1 << 26, 0).decode(errors="replace")

    def members(self) -> list[psutil.Process]:
        """Live processes of the job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until(self, condition: Callable[[], bool], *, bound: float = BOUND) -> None:
        """Waits while the job runs; raises with its output if it ends before, or the bound passes."""
        deadline = time.monotonic() + bound
        while not condition():
            ended = all(process.poll() is not None for process in self.processes)
            if ended or time.monotonic() > deadline:
                said = self.output()[-4000:]
                self.end()
                raise AssertionError(f"it {'ended' if ended else 'hangs'}:\n{said}")
            time.sleep(0.1)

    def result(self, *, bound: float = BOUND, settle: float = 8.0) -> Ended:
        """Waits for the end of all commands, and for what must end because of it; kills what does not.

        Args:
            bound: seconds after which a hang is assumed.
            settle: seconds that other processes of the job may take to end after its commands.
        """
        deadline = time.monotonic() + bound
        try:
            for process in self.processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    text = "\n".join(self.output(number)[-4000:] for number in range(len(self.processes)))
                    raise AssertionError(f"{process.args} hangs:\n{text}") from None
            seconds = time.monotonic() - self._start
            settled = time.monotonic() + settle
            while self.members() and time.monotonic() < settled:
                time.sleep(0.1)
            orphans = []
            for process in self.members():
                with contextlib.suppress(psutil.Error):
                    orphans.append(" ".join(process.cmdline()))
            return Ended(
                [process.returncode for process in self.processes],
                [self.output(number) for number in range(len(self.processes))],
                orphans,
                seconds,
            )
        finally:
            self.end()

    def end(self) -> None:
        """Kills whatever is left."""
        for _ in range(20):
            left = self.members()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            if not left:
                break
        for file in self._files:
            file.close()


def start(*commands: Sequence[str], each: Sequence[Mapping[str, str]] = (), **variables: str) -> Running:
    """Starts commands as one job; `each` and `variables` are environment variables."""
    extra = each or [{} for _ in commands]
    return Running(commands, [{**variables, **own} for own in extra])


def tfdist_run(script: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """`tfdist run -np 2` of one of the scripts."""
    return [sys.executable, "-m", "tfdist", "run", "-np", "2", *options, str(SCRIPTS / script), *arguments]


class Ahead(Generic[T]):
    """Runs the jobs of a module's tests ahead of them, several at a time.

    Args:
        make: runs the job that a name stands for.
        names: the jobs that the selected tests will ask for, in their order.
    """

    def __init__(self, make: Callable[[str], T], names: Sequence[str]) -> None:
        self._make = make
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
        self._futures: dict[str, concurrent.futures.Future[T]] = {}
        for name in names:
            self._submit(name)

    def _submit(self, name: str) -> None:
        if name not in self._futures:
            self._futures[name] = self._pool.submit(self._make, name)

    def __getitem__(self, name: str) -> T:
        self._submit(name)
        return self._futures[name].result()

    def close(self) -> None:
        """Waits for the jobs that run; starts no others."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def run_ahead(request: pytest.FixtureRequest, argument: str, make: Callable[[str], T]) -> Iterator[Ahead[T]]:
    """For a module's fixture: runs `make` for each value of `argument` that its selected tests ask for."""
    names: dict[str, None] = {}
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        if item.path == request.path and call is not None and argument in call.params:
            names[call.params[argument]] = None
    jobs = Ahead(make, list(names))
    try:
        yield jobs
    finally:
        jobs.close()
