"""Sockets of this process are found, and looking for them leaves none behind."""

from __future__ import annotations

import os
import socket

from tfdist.collectives.own_sockets import own_sockets


def test_finds_tcp_sockets_alone_and_leaves_no_descriptor() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        before = os.listdir("/proc/self/fd")
        found = {number for number, _, copy in own_sockets() if copy.fileno() != number}
        assert listener.fileno() in found
        assert other.fileno() not in found
        assert len(os.listdir("/proc/self/fd")) == len(before)
