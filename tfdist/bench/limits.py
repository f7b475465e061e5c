"""What the machine itself gives: one TCP stream over loopback, and copying memory.

No all-reduce between processes of one machine can beat them for long: its bytes go through TCP (or through
shared memory, which copies), and are added on the way.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

_CHUNK = 1 << 20
_COPIED = 256 << 20

# Receives until the sender closes, then says so with one byte.
_RECEIVER = """
import socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
buffer = bytearray(1 << 20)
left = int(sys.argv[2])
line.sendall(b"r")
while left:
    left -= line.recv_into(buffer, min(left, len(buffer)))
line.sendall(b"d")
"""


def tcp_bandwidth(size: int = 512 << 20, *, timeout: float = 60.0) -> float:
    """Bytes a second of one TCP stream over loopback, from this process to a fresh one.

    Args:
        size: bytes to send.
        timeout: bound in seconds of each wait.
    """
    chunk = bytes(_CHUNK)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(timeout)
        command = [sys.executable, "-I", "-S", "-c", _RECEIVER, str(listener.getsockname()[1]), str(size)]
        receiver = stack.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        stack.callback(receiver.kill)
        connection, _ = listener.accept()
        stack.enter_context(connection)
        connection.settimeout(timeout)
        connection.recv(1)
        start = time.perf_counter()
        left = size
        while left:
            left -= connection.send(chunk if left >= _CHUNK else chunk[:left])
        connection.recv(1)
        return size / (time.perf_counter() - start)


def copy_bandwidth(size: int = _COPIED) -> float:
    """Bytes a second of copying memory in one thread, from one array into another."""
    import numpy as np

    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    np.copyto(target, source)  # pages come into being here
    start = time.perf_counter()
    np.copyto(target, source)
    return size / (time.perf_counter() - start)
