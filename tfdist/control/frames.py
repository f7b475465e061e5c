"""Authenticated frames on a TCP stream.

Problem: the control port can be reached by other users of the machine (or the network), and what arrives
there steers the job. So nothing is parsed before it is proven to come from a holder of the job's key, and
nothing is unpickled at all.

Handshake: the server sends `MAGIC` and a random nonce; the client answers `MAGIC`, its own nonce and an
HMAC-SHA256 of both under the job's key. Each direction then has its own session key derived from both nonces,
so frames cannot be replayed on another connection or reflected to their sender; the server proves itself with
its first frame.

Frame: 8 bytes sequence number (strictly rising: no replay within the connection), 4 bytes header length, the
HMAC of sequence number and header, the header (a JSON object), then the parts (raw bytes). The header holds
size and SHA-256 of each part, so the MAC covers them too, a receiver knows that a length is genuine before it
allocates, and the server passes a part on to all ranks without hashing it again.

What this protects: integrity and origin of messages. What it does not: confidentiality (contents travel in
clear text), and anything against another process of the same user.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

MAGIC: Final = b"tfdistC\x01"
NONCE_SIZE: Final = 32
MAC_SIZE: Final = 32
GREETING_SIZE: Final = len(MAGIC) + NONCE_SIZE
ANSWER_SIZE: Final = GREETING_SIZE + MAC_SIZE
MAX_HEADER: Final = 16 << 20
MAX_PAYLOAD: Final = 256 << 20

_PREFIX = struct.Struct(">QI32s")
_MAX_PART = MAX_PAYLOAD + (1 << 20)
_JOIN_BELOW = 64 << 10  # smaller parts are copied behind their header, so that they leave in one system call


class ProtocolViolation(Exception):
    """What arrived is not a valid frame of this conversation; the connection must be dropped."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Opaque bytes with their SHA-256."""

    data: bytes | bytearray
    digest: str

    @classmethod
    def of(cls, data: bytes | bytearray) -> Part:
        return cls(data, hashlib.sha256(data).hexdigest())


@dataclasses.dataclass(frozen=True)
class Frame:
    """One message: a JSON object and raw parts."""

    header: dict[str, Any]
    parts: list[Part]


def make_greeting() -> bytes:
    """What a server sends first."""
    return MAGIC + secrets.token_bytes(NONCE_SIZE)


def make_answer(key: bytes, greeting: bytes) -> bytes:
    """What a client replies to `greeting`."""
    if not greeting.startswith(MAGIC):
        raise ProtocolViolation("the process that listens there is not a tfdist control server")
    nonce = secrets.token_bytes(NONCE_SIZE)
    return MAGIC + nonce + _derive(key, b"answer", greeting, nonce)


def answer_is_valid(key: bytes, greeting: bytes, answer: bytes) -> bool:
    """Whether the client that sent `answer` holds `key`."""
    nonce = answer[len(MAGIC) : GREETING_SIZE]
    return answer.startswith(MAGIC) and hmac.compare_digest(
        answer[GREETING_SIZE:], _derive(key, b"answer", greeting, nonce)
    )


def session_keys(key: bytes, greeting: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """Keys of this connection: for what the client sends, and for what the server sends."""
    nonce = answer[len(MAGIC) : GREETING_SIZE]
    return _derive(key, b"client", greeting, nonce), _derive(key, b"server", greeting, nonce)


def _derive(key: bytes, purpose: bytes, greeting: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + greeting + nonce, "sha256")


class Sealer:
    """Makes the frames of one direction of one connection; not thread-safe."""

    def __init__(self, session_key: bytes) -> None:
        self._key = session_key
        self._sequence = 0

    def seal(self, header: dict[str, Any], parts: Sequence[Part] = ()) -> list[bytes | bytearray]:
        """Buffers to send, in order."""
        if parts:
            header = {**header, "parts": [[len(part.data), part.digest] for part in parts]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER:
            raise ValueError(
                f"keys, checks and announcements may have {MAX_HEADER} bytes together, got {len(text)}. Send "
                "a digest of long values."
            )
        self._sequence += 1
        number = self._sequence.to_bytes(8, "big")
        head = _PREFIX.pack(self._sequence, len(text), hmac.digest(self._key, number + text, "sha256")) + text
        if sum(len(part.data) for part in parts) <= _JOIN_BELOW:
            return [b"".join((head, *(part.data for part in parts)))]
        return [head, *(part.data for part in parts)]


class Opener:
    """Turns the bytes of one direction of one connection back into frames."""

    def __init__(self, session_key: bytes) -> None:
        self._key = session_key
        self._sequence = 0
        self._expect_head()

    def _expect_head(self) -> None:
        self._head = bytearray()
        self._head_size = _PREFIX.size
        self._header: dict[str, Any] | None = None
        self._parts: list[Part] = []
        self._expected: list[tuple[int, str]] = []

    def feed(self, data: memoryview) -> Iterator[Frame]:
        """Yields the frames that `data` completes.

        Raises:
            ProtocolViolation: wrong MAC, repeated sequence number, or a length beyond the bounds.
        """
        while True:
            if self._header is None:
                taken = data[: self._head_size - len(self._head)]
                self._head += taken
                data = data[len(taken) :]
                if len(self._head) < self._head_size:
                    return
                if self._head_size == _PREFIX.size:
                    length = _PREFIX.unpack(self._head)[1]
                    if not 0 < length <= MAX_HEADER:
                        raise ProtocolViolation(f"header of {length} bytes")
                    self._head_size += length
                    continue
                self._header = self._verify_head()
                self._expected = _expected_parts(self._header)
                self._begin_part()
            while self._expected:
                size, digest = self._expected[0]
                taken = data[: size - self._filled]
                self._part[self._filled : self._filled + len(taken)] = taken
                self._filled += len(taken)
                self._hash.update(taken)
                data = data[len(taken) :]
                if self._filled < size:
                    return
                if self._hash.hexdigest() != digest:
                    raise ProtocolViolation("a part differs from its checksum")
                self._parts.append(Part(self._part, digest))
                self._expected.pop(0)
                self._begin_part()
            frame = Frame(self._header, self._parts)
            self._expect_head()
            yield frame

    def _begin_part(self) -> None:
        self._filled = 0
        self._hash = hashlib.sha256()
        self._part = bytearray(self._expected[0][0]) if self._expected else bytearray()

    def _verify_head(self) -> dict[str, Any]:
        sequence, _, mac = _PREFIX.unpack_from(self._head)
        text = bytes(self._head[_PREFIX.size :])
        if not hmac.compare_digest(mac, hmac.digest(self._key, sequence.to_bytes(8, "big") + text, "sha256")):
            raise ProtocolViolation("wrong authentication code")
        if sequence <= self._sequence:
            raise ProtocolViolation("repeated sequence number")
        self._sequence = sequence
        try:
            header = json.loads(text)
        except ValueError as error:
            raise ProtocolViolation("header is not JSON") from error
        if not isinstance(header, dict):
            raise ProtocolViolation("header is not an object")
        return header


def _expected_parts(header: dict[str, Any]) -> list[tuple[int, str]]:
    try:
        expected = [(int(size), str(digest)) for size, digest in header.pop("parts", [])]
    except (TypeError, ValueError) as error:
        raise ProtocolViolation("malformed list of parts") from error
    if any(not 0 <= size <= _MAX_PART for size, _ in expected):
        raise ProtocolViolation("part beyond the bound")
    return expected
