"""Handlers of /aenv and /health: what E2B's API has no place for, under the same conventions."""

from __future__ import annotations

from starlette.responses import Response

from agentenv.api import render
from agentenv.api.call import Call, NoBody, json_response, no_content
from agentenv.api.names import sandbox_id
from agentenv.errors import NotFound


async def health(call: Call[NoBody]) -> Response:
    """GET /health, without a key: this process answers. Whether the node is well is in /aenv/node."""
    return no_content()


async def node(call: Call[NoBody]) -> Response:
    """GET /aenv/node."""
    return json_response(200, call.node.describe())


async def sandbox(call: Call[NoBody]) -> Response:
    """GET /aenv/sandboxes/{id}: the true state and how safe a pause is."""
    return json_response(200, render.own(call.node.get(sandbox_id(call.params["sandbox_id"]))))


async def tombstone(call: Call[NoBody]) -> Response:
    """GET /aenv/tombstones/{id}: why a sandbox ended, for a day."""
    identifier = sandbox_id(call.params["sandbox_id"])
    stone = call.node.tombstone(identifier)
    if stone is None:
        raise NotFound(f"sandbox {identifier} has no tombstone: it lives, never was, or ended more than a day ago")
    return json_response(200, render.tombstone(stone))
