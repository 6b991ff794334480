"""The resolver's side of the proxy protocol, without I/O: a question read, a node's answer written.

Owns the exact bodies that a client of a sandbox gets when there is nowhere to send its request. The bytes are pinned by
`spec/wire/route/`, which the proxy's tests read too. What the proxy says on its own (port closed, traffic token,
internal routes) is in `crates/proxy/src/answer.rs`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from agentenv.errors import InvalidRequest
from agentenv.node.interface import RouteAnswer, RouteRefusal, RouteTarget

PORT_MAX: Final = 65_535

# E2B's SDKs look for "was not found" in the message to tell a dead sandbox from a failing one, and retry a 409.
_REFUSALS: Final[dict[str, tuple[int, str, dict[str, str]]]] = {
    "not_found": (502, "The sandbox was not found", {}),
    "in_transition": (409, "The sandbox is changing its state; retry", {"retry-after": "1"}),
}


def parse_question(body: bytes) -> tuple[str, int]:
    """Sandbox id and port that the proxy asks for.

    Raises `InvalidRequest` naming the field. The id may be any text: an unknown one is the node's to refuse.
    """
    try:
        question = json.loads(body)
    except ValueError as error:
        raise InvalidRequest("the resolve request is not JSON") from error
    if not isinstance(question, dict):
        raise InvalidRequest("the resolve request is not a JSON object")
    sandbox_id, port = question.get("sandbox_id"), question.get("port")
    if not isinstance(sandbox_id, str):
        raise InvalidRequest("sandbox_id of the resolve request is not text")
    # bool is an int to isinstance.
    if type(port) is not int or not 0 < port <= PORT_MAX:
        raise InvalidRequest(f"port of the resolve request is not a number from 1 to {PORT_MAX}")
    return sandbox_id, port


def encode_answer(answer: RouteAnswer) -> bytes:
    """The body of the 200 answer to `POST /resolve`."""
    match answer:
        case RouteTarget():
            return _compact(_target_fields(answer))
        case RouteRefusal():
            return _compact({"refuse": _refusal_fields(answer)})


def _target_fields(target: RouteTarget) -> dict[str, Any]:
    return {
        "address": target.address,
        "port": target.port,
        "generation": target.generation,
        "traffic_token": target.traffic_token,
        "host_mask": target.host_mask,
    }


def _refusal_fields(refusal: RouteRefusal) -> dict[str, Any]:
    """Raises KeyError for a reason that `RouteRefusal` does not document, which is a bug of the node."""
    status, message, headers = _REFUSALS[refusal.reason]
    return {
        "status": status,
        "headers": {"content-type": "application/json; charset=utf-8", **headers},
        "body": {"sandboxId": refusal.sandbox_id, "message": message, "code": status},
    }


def _compact(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
