"""The framing of Connect streams, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.client import envelope
from agentenv.client.errors import BY_CONNECT_CODE, ApiError, ProtocolError, from_answer, from_connect
from agentenv.client.rpc import end_error


@given(
    messages=st.lists(st.tuples(st.sampled_from([0, 2]), st.binary(max_size=300))), cuts=st.lists(st.integers(1, 50))
)
def test_any_cutting_gives_the_same_messages(messages, cuts):
    data = b"".join(envelope.encode(message, flags) for flags, message in messages)
    decoder = envelope.Decoder()
    found = []
    start = 0
    for cut in [*cuts, len(data)]:
        found += decoder.feed(data[start : start + cut])
        start += cut
    assert found == messages
    assert decoder.pending == 0


def test_bytes_on_the_wire():
    assert envelope.encode(b'{"a":1}', 2) == b"\x02\x00\x00\x00\x07" + b'{"a":1}'


def test_a_half_message_is_pending():
    decoder = envelope.Decoder()
    assert list(decoder.feed(envelope.encode(b"abc")[:-1])) == []
    assert decoder.pending == 7


@pytest.mark.parametrize("header", [b"\x01\x00\x00\x00\x00", b"\x04\x00\x00\x00\x00", b"\x00\xff\xff\xff\xff"])
def test_what_was_not_negotiated_is_refused(header):
    with pytest.raises(ProtocolError):
        list(envelope.Decoder().feed(header))


@pytest.mark.parametrize(("code", "kind"), BY_CONNECT_CODE.items())
def test_end_frame_errors_become_classes(code, kind):
    error = end_error(b'{"error":{"code":"%s","message":"text"}}' % code.encode())
    assert type(error) is kind
    assert str(error) == "text"


def test_end_frames_without_error():
    assert end_error(b"{}") is None
    assert end_error(b"") is None


def test_unknown_codes_keep_what_they_say():
    error = from_connect("brand_new", "text")
    assert (type(error), error.error_code) == (ApiError, "brand_new")
    assert type(from_answer(418, "teapot", None)) is ApiError
