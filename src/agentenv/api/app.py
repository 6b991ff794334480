"""The public API as an ASGI app, served on RUN/api.sock behind the proxy.

Owns the assembly: routes from the table, errors for what no route takes, and the splitting of paths. There is no
middleware that could buffer: the one wrapper below only rewrites the path in the scope.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentenv.api import errors
from agentenv.api.builds import TemplateBuilder
from agentenv.api.call import Context, Endpoint, internal_error_response, run
from agentenv.api.idempotency import Idempotency
from agentenv.api.images import ImageService
from agentenv.api.keys import ApiKeys
from agentenv.api.names import shown
from agentenv.api.routes import ENDPOINTS
from agentenv.api.settings import ApiSettings
from agentenv.api.storage import StorageService
from agentenv.clock import Clock, RealClock
from agentenv.errors import AenvError, InvalidRequest
from agentenv.node.interface import NodeInterface


def create_app(
    node: NodeInterface,
    keys: ApiKeys,
    settings: ApiSettings | None = None,
    clock: Clock | None = None,
    builder: TemplateBuilder | None = None,
    images: ImageService | None = None,
    storage: StorageService | None = None,
) -> Starlette:
    """The app for one node. It holds no state but the idempotency store, which dies with it.

    Routes whose builder, images or storage is None answer 501.
    """
    chosen = settings or ApiSettings()
    now = clock or RealClock()
    idempotency = Idempotency(now, chosen.idempotency_entries_max, chosen.idempotency_ttl_s)
    context = Context(
        node=node,
        keys=keys,
        settings=chosen,
        idempotency=idempotency,
        clock=now,
        builder=builder,
        images=images,
        storage=storage,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await idempotency.close()

    app = Starlette(
        routes=[_route(endpoint, context) for endpoint in ENDPOINTS],
        middleware=[Middleware(EncodedPath)],
        exception_handlers={HTTPException: unmatched},
        lifespan=lifespan,
    )
    # A redirect to a path with or without its slash would lose the body and the key of the request.
    app.router.redirect_slashes = False
    return app


class EncodedPath:
    """Match routes on the path as it was sent, so that `%2F` in a template's name is no separator.

    Path parameters are decoded after the split.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (or the lifespan)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        raw = scope.get("raw_path")
        if raw:
            scope = {**scope, "path": raw.partition(b"?")[0].decode("latin-1")}
        await self._app(scope, receive, send)


def _route(endpoint: Endpoint[Any], context: Context) -> Route:
    async def serve(request: Request) -> Response:
        try:
            params = {name: _decoded(value) for name, value in request.path_params.items()}
        except AenvError as error:
            return errors.error_response(error)
        return await run(endpoint, context, request, params)

    return Route(endpoint.path, serve, methods=[endpoint.method], name=endpoint.operation)


def _decoded(segment: str) -> str:
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidRequest("path: percent-encoding is not valid UTF-8") from error


async def unmatched(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {shown(request.url.path)}"
    if error.status_code == 405:
        return errors.error_response(errors.MethodNotAllowed(f"{what}: method not allowed"), error.headers)
    if error.status_code == 404:
        return errors.error_response(errors.RouteNotFound(f"{what}: no such route"))
    return internal_error_response("unmatched", error)
