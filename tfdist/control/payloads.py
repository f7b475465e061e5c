"""Payloads as bytes: JSON plus raw attachments, never pickle.

JSON has no bytes, and base64 costs a third more and a copy; so bytes are cut out of the JSON text and follow
it in the order in which they occur. A dict becomes `{"map": {...}}` and bytes become `{"bytes": length}`, so
that no value a caller sends can be taken for one of the marks.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from tfdist.control.frames import MAX_PAYLOAD

_TEXT_SIZE = struct.Struct(">I")


def encode_payload(value: Any) -> bytes:
    """Bytes of `value`: None, bool, int, float, str, bytes, and lists, tuples and dicts of them.

    Raises:
        TypeError: another type, or a dict key that is not a string.
        ValueError: more than 256 MiB.
    """
    attachments: list[bytes] = []
    text = json.dumps(_detach(value, attachments), separators=(",", ":")).encode()
    size = _TEXT_SIZE.size + len(text) + sum(map(len, attachments))
    if size > MAX_PAYLOAD:
        raise ValueError(
            f"a payload of the control channel may have {MAX_PAYLOAD} bytes, this one has {size}. "
            "Send it in pieces, or as a tensor through a collective."
        )
    return b"".join((_TEXT_SIZE.pack(len(text)), text, *attachments))


def decode_payload(data: bytes | bytearray) -> Any:
    """The value that `encode_payload` was given; tuples come back as lists."""
    view = memoryview(data)
    (size,) = _TEXT_SIZE.unpack_from(view)
    end = _TEXT_SIZE.size + size
    return _attach(json.loads(bytes(view[_TEXT_SIZE.size : end])), _Attachments(view[end:]))


class _Attachments:
    def __init__(self, view: memoryview) -> None:
        self._view = view

    def take(self, size: int) -> bytes:
        taken, self._view = bytes(self._view[:size]), self._view[size:]
        return taken


def _detach(value: Any, attachments: list[bytes]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        attachments.append(bytes(value))
        return {"bytes": len(attachments[-1])}
    if isinstance(value, (list, tuple)):
        return [_detach(item, attachments) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"dict keys in a control payload must be strings, got {key!r}")
        return {"map": {key: _detach(item, attachments) for key, item in value.items()}}
    raise TypeError(
        "a control payload may hold None, bool, int, float, str, bytes, list, tuple and dict, got "
        f"{type(value).__name__}. Serialise other objects to bytes first."
    )


def _attach(value: Any, attachments: _Attachments) -> Any:
    if isinstance(value, list):
        return [_attach(item, attachments) for item in value]
    if isinstance(value, dict):
        if "bytes" in value:
            return attachments.take(value["bytes"])
        return {key: _attach(item, attachments) for key, item in value["map"].items()}
    return value
