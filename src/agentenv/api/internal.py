"""The resolver that the proxy asks, served on RUN/internal.sock: `POST /resolve`.

Only the proxy reaches that socket, so there is no key. The node decides; what its answer looks like on the wire is
`routing`'s. A node's error (the sandbox could not be resumed) is a refusal that the proxy hands to its client as it
is, with the status of the one table; anything but 200 means to the proxy that the server itself is unwell.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agentenv.api import errors
from agentenv.api.app import unmatched
from agentenv.api.call import internal_error_response
from agentenv.api.log import log
from agentenv.api.names import sandbox_id
from agentenv.errors import AenvError, InvalidRequest, SandboxNotFound
from agentenv.node.interface import NodeInterface, RouteAnswer, RouteRefusal
from agentenv.routing import encode_answer, parse_question

# Less than the proxy's own deadline of 120 s, so that its client gets our words rather than the proxy's.
RESOLVE_S_MAX: Final = 115.0
_BODY_BYTES_MAX: Final = 4_096


def create_internal_app(node: NodeInterface, resolve_s_max: float = RESOLVE_S_MAX) -> Starlette:
    """The app for one node."""

    async def resolve(request: Request) -> Response:
        try:
            asked, port = _question(await _read(request))
            return _json(encode_answer(await _route(node, asked, port, resolve_s_max)))
        except InvalidRequest as error:
            return errors.error_response(error)
        except AenvError as error:
            log.warning("refused", operation="resolve", error=type(error).__name__, reason=str(error)[:500])
            return _json(_refusal(error))
        except Exception as error:
            return internal_error_response("resolve", error)

    return Starlette(
        routes=[Route("/resolve", resolve, methods=["POST"])], exception_handlers={HTTPException: unmatched}
    )


async def _route(node: NodeInterface, asked: str, port: int, resolve_s_max: float) -> RouteAnswer:
    try:
        identifier = sandbox_id(asked)
    except SandboxNotFound:
        # It is sent back to whoever asked for it; a lone surrogate cannot be.
        return RouteRefusal(asked.encode(errors="replace").decode(), "not_found")
    try:
        async with asyncio.timeout(resolve_s_max):
            return await node.resolve_route(identifier, port)
    except TimeoutError as error:
        raise errors.BudgetExceeded(f"the sandbox was not ready within {resolve_s_max:g} seconds") from error


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _BODY_BYTES_MAX:
                raise errors.PayloadTooLarge(f"request body is larger than {_BODY_BYTES_MAX} bytes")
    except ClientDisconnect as error:
        raise errors.ClientGone("the proxy closed the connection while sending its body") from error
    return bytes(body)


def _question(body: bytes) -> tuple[str, int]:
    try:
        return parse_question(body)
    except RecursionError as error:
        raise InvalidRequest("request body is nested too deeply") from error


def _refusal(error: AenvError) -> bytes:
    response = errors.error_response(error)
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    refuse = {"status": response.status_code, "headers": headers, "body": json.loads(bytes(response.body))}
    return json.dumps({"refuse": refuse}, separators=(",", ":")).encode()


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
