"""The TCP sockets of this process, also those that libraries opened (Linux)."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def own_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """Yields file descriptor, inode, which tells whether it is still the same, and a copy that is closed after."""
    try:
        names = os.listdir("/proc/self/fd")
    except FileNotFoundError:  # another system
        return
    for name in names:
        with contextlib.suppress(OSError):
            number = int(name)
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield number, status.st_ino, copy
