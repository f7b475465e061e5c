"""Keeps a gRPC server that TensorFlow has started to this host.

Problem: `tf.distribute.Server` listens on all interfaces, whatever address the cluster gives it, and asks
nobody who he is: whoever reaches the port can run graphs in the process. TensorFlow has no option for it.

Solution: the listening sockets belong to this process, so it finds them and binds them to the loopback device
(SO_BINDTODEVICE, Linux >= 5.7 without privileges). The kernel then refuses connections from other interfaces. For
the milliseconds between the start of the server and this call the port is open.
"""

from __future__ import annotations

import socket

from tfdist.collectives.own_sockets import own_sockets


def keep_to_loopback(port: int) -> bool:
    """Makes this process's servers on a TCP port reachable from this host only.

    Args:
        port: where they listen.

    Returns:
        Whether the kernel agreed; False on other systems, and in older kernels without privileges.
    """
    bound = []
    for _, _, candidate in own_sockets():
        if not _listens(candidate, port):
            continue
        try:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
            bound.append(True)
        except (OSError, AttributeError):
            bound.append(False)
    return bool(bound) and all(bound)


def _listens(candidate: socket.socket, port: int) -> bool:
    try:
        listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens and candidate.getsockname()[1] == port)
    except OSError:
        return False
