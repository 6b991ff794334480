"""The control protocol's golden bytes, from Python's side; `crates/wire` checks the same file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agentenv.block import wire

GOLDEN = Path(__file__).parents[3] / "spec" / "wire" / "block.golden"

LINES = [tuple(line.split("\t", 1)) for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
REQUESTS = {str(operation.__struct_config__.tag): operation for operation in wire.ANSWERS}


@pytest.mark.parametrize(("name", "body"), LINES)
def test_every_message_has_its_golden_bytes(name: str, body: str) -> None:
    """Requests encode to exactly the line; answers decode from it and encode to it again."""
    if name.startswith(("ok.", "error.")):
        answer = wire.decode(body.encode())
        half = name.split(".")[1]
        if isinstance(answer.error, wire.Refusal):
            assert name == f"error.{answer.error.kind}"
        else:
            assert isinstance(answer.ok, msgspec.Raw)
            ok = wire.decode_ok(answer.ok, wire.ANSWERS[REQUESTS[half]])
            assert msgspec.json.encode(ok) == bytes(answer.ok)
        return
    fields = msgspec.json.decode(body)
    request = msgspec.json.decode(body, type=REQUESTS[fields["op"]])
    assert wire.encode(fields["id"], request) == body.encode()


def test_every_operation_has_a_golden_request_and_answer() -> None:
    """A new operation cannot be forgotten in the golden file."""
    names = {name for name, _ in LINES}
    assert {*REQUESTS, *(f"ok.{name}" for name in REQUESTS)} <= names


def test_a_frame_is_length_then_body() -> None:
    """The length is a little-endian u32 and does not count itself."""
    assert wire.frame(b"{}") == b"\x02\x00\x00\x00{}"


def test_a_request_over_the_frame_limit_is_refused_before_it_is_sent() -> None:
    """The daemon would drop the connection, and everybody's requests with it."""
    with pytest.raises(ValueError, match="limit"):
        wire.encode(1, wire.SyncPaths(("/x" * wire.FRAME_BYTES_MAX,)))
