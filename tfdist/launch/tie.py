"""Ties a rank's life to its launcher's, then becomes the rank.

Run as a script: `python -I -S tie.py LAUNCHER_PID COMMAND...`. Linux can kill a process when its parent dies,
but only the process itself can ask for that, between fork and exec. Asking in Python's `preexec_fn` would run
Python code in a forked child of a threaded process (a notebook with TensorFlow), which may deadlock; a fresh
small process cannot. It costs about 20 ms.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, command: list[str]) -> int:
    """Replaces this process with `command`; returns the shell's exit code when that is impossible."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        return 128 + signal.SIGKILL  # the launcher died before the tie was in place
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"tfdist run: cannot start {command[0]!r}: {error.strerror}.", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
