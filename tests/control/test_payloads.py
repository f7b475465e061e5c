from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.control import payloads
from tfdist.control.payloads import decode_payload, encode_payload

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["map", "bytes"]), inner),
    max_leaves=20,
)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert decode_payload(encode_payload(value)) == value


def test_tuples_arrive_as_lists_and_buffers_as_bytes() -> None:
    assert decode_payload(encode_payload((1, (bytearray(b"a"), memoryview(b"b"))))) == [1, [b"a", b"b"]]


@pytest.mark.parametrize(("value", "named"), [({1: 2}, "1"), ([object()], "object"), ({1, 2}, "set")])
def test_other_types_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        encode_payload(value)


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MAX_PAYLOAD", 100)
    with pytest.raises(ValueError, match="may have 100 bytes"):
        encode_payload(bytes(101))
