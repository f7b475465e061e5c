"""How much memory this process takes at most while it does something.

On Linux: the peak of what is resident, above what was there before. It counts what TensorFlow's allocator has not
given back, too, so measure in a fresh process, once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

_INTERVAL = 0.002  # seconds between two looks
OVER = 77  # exit code of a process that took more than it may


class PeakMemory:
    """Bytes above the start, while it is being measured.

    Attributes:
        peak: the most so far.

    Args:
        limit: bytes above the start at which the process ends itself with the code `OVER`, before the machine is
            out of memory; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.peak = 0
        self._limit = limit
        self._start = resident_bytes()

    def restart(self) -> None:
        """Counts from what is resident now."""
        self._start = resident_bytes()
        self.peak = 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, it is measured."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _watch(self, done: threading.Event) -> None:
        while not done.is_set():
            self.peak = max(self.peak, resident_bytes() - self._start)
            if self._limit is not None and self.peak > self._limit:
                os._exit(OVER)
            time.sleep(_INTERVAL)


def resident_bytes() -> int:
    """What this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
