"""Counts what this process sends over TCP, by asking the kernel about each of its sockets.

Linux keeps the acknowledged bytes of every connection (`tcpi_bytes_acked` in struct tcp_info), readable by the
owner of the socket: no root, no tool, no interference by other processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_ESTABLISHED = 1
_BYTES_ACKED = 120  # offset in struct tcp_info, after 8 bytes and 24 words and two pacing rates


def bytes_sent() -> int:
    """Bytes that the peers of all open connections of this process have acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                over_ip = duplicate.family in (socket.AF_INET, socket.AF_INET6)
                if not over_ip or duplicate.type != socket.SOCK_STREAM:
                    continue
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if info[0] == _ESTABLISHED:
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
    return total
