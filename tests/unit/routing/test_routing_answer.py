"""The bytes that the resolver sends to the proxy, against the golden files that the proxy's tests read too."""

import json
from pathlib import Path

import pytest

from agentenv.errors import InvalidRequest
from agentenv.node.interface import RouteAnswer, RouteRefusal, RouteTarget
from agentenv.routing import encode_answer, parse_question

GOLDEN = Path(__file__).parents[3] / "spec" / "wire" / "route"
SANDBOX_ID = "iabcdefghij0123456789"


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes().rstrip()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("resolve-target", RouteTarget("10.12.0.7", 8080, 41, None, None)),
        ("resolve-target-guarded", RouteTarget("10.12.0.7", 8080, 41, "tok", "localhost:${PORT}")),
        ("resolve-refuse-not-found", RouteRefusal(SANDBOX_ID, "not_found")),
        ("resolve-refuse-in-transition", RouteRefusal(SANDBOX_ID, "in_transition")),
    ],
)
def test_answers_have_their_golden_bytes(name: str, answer: RouteAnswer) -> None:
    assert encode_answer(answer) == golden(name)


def test_only_a_dead_sandbox_is_said_to_be_not_found() -> None:
    assert b"was not found" in encode_answer(RouteRefusal(SANDBOX_ID, "not_found"))
    assert b"was not found" not in encode_answer(RouteRefusal(SANDBOX_ID, "in_transition"))


def test_an_undocumented_reason_is_a_bug() -> None:
    with pytest.raises(KeyError):
        encode_answer(RouteRefusal(SANDBOX_ID, "tired"))


def test_the_question_is_read() -> None:
    assert parse_question(golden("resolve-request")) == (SANDBOX_ID, 8080)


@pytest.mark.parametrize("port", [0, 65_536, -1, True, "80", 80.0, None])
def test_an_impossible_port_is_named(port: object) -> None:
    with pytest.raises(InvalidRequest, match="port"):
        parse_question(json.dumps({"sandbox_id": "i", "port": port}).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"port":1}', b'{"sandbox_id":1,"port":1}'])
def test_other_questions_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_question(body)
