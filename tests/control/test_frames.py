from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.control.frames import (
    ANSWER_SIZE,
    GREETING_SIZE,
    MAX_HEADER,
    Frame,
    Opener,
    Part,
    ProtocolViolation,
    Sealer,
    answer_is_valid,
    make_answer,
    make_greeting,
    session_keys,
)

KEY = b"k" * 32


def wire(sealer: Sealer, header: dict[str, object], *parts: bytes) -> bytes:
    return b"".join(sealer.seal(header, [Part.of(part) for part in parts]))


def feed(opener: Opener, data: bytes) -> list[Frame]:
    return list(opener.feed(memoryview(data)))


@given(
    messages=st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.lists(st.binary()))),
    cuts=st.lists(st.integers(1, 50), min_size=1),
)
def test_frames_survive_any_fragmentation(
    messages: list[tuple[dict[str, int], list[bytes]]], cuts: list[int]
) -> None:
    messages = [({f"_{name}": value for name, value in header.items()}, parts) for header, parts in messages]
    sealer, opener = Sealer(KEY), Opener(KEY)
    data = b"".join(wire(sealer, dict(header), *parts) for header, parts in messages)
    received = []
    turn = 0
    while data:
        size = cuts[turn % len(cuts)]
        received += feed(opener, data[:size])
        data, turn = data[size:], turn + 1
    assert [(frame.header, [bytes(part.data) for part in frame.parts]) for frame in received] == messages


def test_large_parts_are_not_copied_into_one_buffer() -> None:
    part = Part.of(bytes(1 << 20))
    assert Sealer(KEY).seal({}, [part])[1] is part.data


@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(place: int, flip: int) -> None:
    data = bytearray(wire(Sealer(KEY), {"type": "exchange"}, b"payload"))
    data[place % len(data)] ^= flip
    opener = Opener(KEY)
    try:
        frames = feed(opener, bytes(data))
    except ProtocolViolation:
        return
    assert frames == []  # a larger length: it waits for bytes that never match


def test_replay_is_refused() -> None:
    data = wire(Sealer(KEY), {"type": "goodbye"})
    opener = Opener(KEY)
    assert len(feed(opener, data)) == 1
    with pytest.raises(ProtocolViolation, match="sequence"):
        feed(opener, data)


def test_huge_header_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolViolation, match="header of"):
        feed(Opener(KEY), struct.pack(">QI32s", 1, MAX_HEADER + 1, b""))


def test_huge_part_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ProtocolViolation, match="bound"):
        feed(Opener(KEY), wire(Sealer(KEY), {"parts": [[1 << 60, ""]]}))


@pytest.mark.parametrize("header", [[1], {"parts": 3}, {"parts": [[-1, ""]]}, {"parts": [["x", ""]]}])
def test_malformed_header_of_a_key_holder_is_refused(header: object) -> None:
    sealer = Sealer(KEY)
    with pytest.raises(ProtocolViolation):
        feed(Opener(KEY), wire(sealer, header))  # type: ignore[arg-type]


def test_sender_refuses_a_header_that_the_receiver_would() -> None:
    with pytest.raises(ValueError, match="digest"):
        Sealer(KEY).seal({"check": "x" * MAX_HEADER})


def test_handshake_gives_both_sides_the_same_keys_and_each_direction_its_own() -> None:
    greeting = make_greeting()
    answer = make_answer(KEY, greeting)
    assert (len(greeting), len(answer)) == (GREETING_SIZE, ANSWER_SIZE)
    assert answer_is_valid(KEY, greeting, answer)
    assert not answer_is_valid(b"other", greeting, answer)
    assert not answer_is_valid(KEY, make_greeting(), answer)  # an answer recorded elsewhere
    from_client, from_server = session_keys(KEY, greeting, answer)
    assert from_client != from_server
    data = wire(Sealer(from_client), {"type": "hello"})
    with pytest.raises(ProtocolViolation):  # reflected to its sender
        feed(Opener(from_server), data)


def test_client_does_not_answer_another_protocol() -> None:
    with pytest.raises(ProtocolViolation, match="not a tfdist"):
        make_answer(KEY, b"220 mail.example.org ESMTP ready to go, please!!"[:GREETING_SIZE])


def test_contents_are_json_only() -> None:
    data = wire(Sealer(KEY), {"a": 1})
    assert json.loads(data[struct.calcsize(">QI32s") :]) == {"a": 1}
