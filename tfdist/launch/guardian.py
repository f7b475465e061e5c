"""Ends a run whose launcher was killed: the ranks, their children, and the run's private folder.

Run as a script: `python -I -S guardian.py LAUNCHER_PID JOB FOLDER`, with a pipe from the launcher as standard
input. The launcher writes the process group of every rank that it starts, one a line, and `done` when it has
ended them all itself. End of file without `done` means that the launcher is gone; then nobody else is left to
clean up. A process group is not enough, since a rank's child may have left it (daemons do): whatever carries
the run's TFDIST_JOB in its environment is ended too.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys

_POLL = 0.5  # seconds; a fork of the launcher may hold the pipe open, so its death is looked for as well


def processes_of(job: str) -> list[int]:
    """Live processes that were started with TFDIST_JOB=`job`; none where there is no /proc."""
    mark = f"TFDIST_JOB={job}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):  # a zombie's environment is empty
                    found.append(int(name))
    return found


def signal_groups(groups: list[int], number: int) -> None:
    """Sends a signal to every process group; those that no longer exist are passed over."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def kill_everything(groups: list[int], job: str) -> None:
    """Kills the groups and whatever else belongs to the run, until nothing is left of it."""
    signal_groups(groups, signal.SIGKILL)
    for _ in range(100):  # a process may fork between the look and the blow
        left = processes_of(job)
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        select.select([], [], [], 0.01)


def main(launcher: int, job: str, folder: str) -> None:
    """Waits for `done` or for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    text = b""
    while os.getppid() == launcher:
        if not select.select([0], [], [], _POLL)[0]:
            continue
        chunk = os.read(0, 4096)
        if not chunk:
            break
        *lines, text = (text + chunk).split(b"\n")
        if b"done" in lines:
            return
        groups += [int(line) for line in lines]
    kill_everything(groups, job)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
