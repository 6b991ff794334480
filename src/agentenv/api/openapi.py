"""The OpenAPI document, derived from the route table and the wire types.

`spec/openapi.json` is its output; a test compares them. Regenerate it with `python -m agentenv.api.openapi FILE`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from agentenv.api import wire
from agentenv.api.call import JSON, Endpoint, NoBody
from agentenv.api.routes import ENDPOINTS
from agentenv.api.sandboxes import FROZEN_HEADER
from agentenv.api.streams import NDJSON

# Every authenticated route may answer these; the table adds its own.
_COMMON_ERRORS: Final = (400, 401, 500)
_CHANGING_ERRORS: Final = (408, 413, 429, 503, 504)
_REASONS: Final = {
    200: "OK",
    201: "Created or resumed",
    204: "Done, no body",
    400: "The request is malformed, out of range, or asks for a feature that this version does not have",
    401: "The API key is missing or unknown",
    404: "Not found",
    408: "The body did not arrive in time",
    409: "The state forbids it, or an Idempotency-Key is in use",
    413: "The body is too large",
    422: "The Idempotency-Key was used with another request",
    429: "The node is full; see Retry-After",
    500: "It failed here",
    501: "This server was put together without the part that the route needs",
    503: "The server is stopping; see Retry-After",
    504: "The guest did not answer, or the time budget is used up",
    507: "The disk has no room",
}
_HEADERS: Final[dict[str, tuple[str, ...]]] = {
    "listSandboxes": ("X-Next-Token", "X-Total-Running"),
    "listSnapshots": ("X-Next-Token",),
    "forkSandbox": (FROZEN_HEADER,),
    "snapshotSandbox": (FROZEN_HEADER,),
}


def document() -> dict[str, Any]:
    """The whole document, with stable order."""
    shapes = _shapes()
    _, components = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "AgentENV",
            "version": "1",
            "description": "E2B's control plane as its SDKs call it, and the node's own endpoints under /aenv.",
        },
        "security": [{"apiKey": []}, {"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-KEY"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
            "schemas": dict(sorted(components.items())),
        },
    }


def text() -> str:
    """The document as it is stored."""
    return json.dumps(document(), indent=2, sort_keys=True) + "\n"


def _shapes() -> list[Any]:
    found: list[Any] = [wire.ErrorBody]
    for endpoint in ENDPOINTS:
        shapes = (endpoint.body, endpoint.lines, *endpoint.results.values())
        found += [shape for shape in shapes if shape not in (None, NoBody)]
    return found


def _schema(shape: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([shape], ref_template="#/components/schemas/{name}")
    return schema


def _operation(endpoint: Endpoint[Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in endpoint.query]
    if 422 in endpoint.errors:
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}})
    operation: dict[str, Any] = {
        "operationId": endpoint.operation,
        "summary": _summary(endpoint),
        "parameters": parameters,
        "responses": _responses(endpoint),
    }
    if endpoint.body is not NoBody:
        schema = _schema(endpoint.body)
        required = any(field.required for field in msgspec.structs.fields(endpoint.body))
        operation["requestBody"] = {"required": required, "content": {JSON: {"schema": schema}}}
    if not endpoint.authenticated:
        operation["security"] = []
    return operation


def _summary(endpoint: Endpoint[Any]) -> str:
    first = (endpoint.handler.__doc__ or "").strip().partition("\n")[0]
    return first.rstrip(".:")


def _responses(endpoint: Endpoint[Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, shape in endpoint.results.items():
        answer: dict[str, Any] = {"description": _REASONS[status]}
        answers[str(status)] = answer
        if shape is not None:
            answer["content"] = {JSON: {"schema": _schema(shape)}}
        elif endpoint.media_type != JSON:
            answer["content"] = {endpoint.media_type: {"schema": {"type": "string", "format": "binary"}}}
        if names := _HEADERS.get(endpoint.operation):
            answer["headers"] = {name: {"schema": {"type": "string"}} for name in names}
    if endpoint.lines is not None:
        # One JSON object a line, to clients that ask for it in Accept; the last one has the result or the error.
        streamed = answers.setdefault("200", {"description": _REASONS[200]})
        streamed.setdefault("content", {})[NDJSON] = {"schema": _schema(endpoint.lines)}
    statuses = set(endpoint.errors)
    if endpoint.authenticated:
        statuses |= {*_COMMON_ERRORS, *(_CHANGING_ERRORS if endpoint.mutates else ())}
    error = {"content": {JSON: {"schema": _schema(wire.ErrorBody)}}}
    answers |= {str(status): {"description": _REASONS[status], **error} for status in sorted(statuses)}
    return answers


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
