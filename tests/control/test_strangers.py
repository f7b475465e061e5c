"""What anybody can send to the control port must not disturb the ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.worlds import in_threads, open_world
from tfdist.control import ControlPlane, loop, server
from tfdist.control import rendezvous as meeting
from tfdist.control.frames import ANSWER_SIZE, GREETING_SIZE, MAGIC, Sealer, make_answer, session_keys
from tfdist.control.rendezvous import Address


@contextlib.contextmanager
def world(rendezvous: str, size: int = 2) -> Iterator[tuple[list[ControlPlane], Address]]:
    with open_world(size, rendezvous) as planes:
        yield planes, meeting.read(Path(rendezvous.removeprefix("file://")))


def dial(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port))


def works(planes: list[ControlPlane]) -> bool:
    size = len(planes)
    expected = [list(range(size))] * size
    return in_threads([lambda p=plane: p.exchange("k", p.spec.rank) for plane in planes]) == expected


def is_dropped(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
    "random": os.urandom(5000),
    "zeros": bytes(ANSWER_SIZE),
    "wrong key": MAGIC + os.urandom(ANSWER_SIZE - len(MAGIC)),
    "huge length": struct.pack(">Q", 1 << 62) * 40,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_dropped(kind: str, rendezvous: str) -> None:
    with world(rendezvous) as (planes, address), dial(address) as sock:
        sock.sendall(GARBAGE[kind])
        assert is_dropped(sock)
        assert works(planes)


@pytest.mark.parametrize("message", ["unsealed", "before hello", "unknown", "not a dict", "broken hello"])
def test_key_holder_that_talks_nonsense_is_dropped(message: str, rendezvous: str) -> None:
    with world(rendezvous) as (planes, address), dial(address) as sock:
        greeting = sock.recv(GREETING_SIZE, socket.MSG_WAITALL)
        answer = make_answer(address.key, greeting)
        sock.sendall(answer)
        sealer = Sealer(session_keys(address.key, greeting, answer)[0])
        if message == "unsealed":
            sock.sendall(b'{"type": "goodbye"}' * 20)
        else:
            header = {
                "before hello": {"type": "goodbye", "error": "x"},
                "unknown": {"type": "reboot"},
                "not a dict": [1],
                "broken hello": {"type": "hello", "rank": 1},
            }[message]
            sock.sendall(b"".join(sealer.seal(header)))  # type: ignore[arg-type]
        assert is_dropped(sock)
        assert works(planes)


def test_silent_strangers_are_dropped_in_time(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STRANGER_PATIENCE", 0.5)
    with world(rendezvous) as (planes, address), dial(address) as sock:
        sock.sendall(MAGIC)
        begin = time.monotonic()
        assert is_dropped(sock)
        assert time.monotonic() - begin > 0.3
        assert works(planes)


def test_crowd_of_strangers(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_MAX_STRANGERS", 20)
    with world(rendezvous) as (planes, address), contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(dial(address)) for _ in range(300)]
        assert works(planes)
        assert is_dropped(strangers[0])
        strangers[-1].settimeout(0.2)
        assert strangers[-1].recv(4096)  # the greeting: the newest may still turn out to be a rank
        with pytest.raises(TimeoutError):
            strangers[-1].recv(4096)
