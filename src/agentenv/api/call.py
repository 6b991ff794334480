"""One request on its way through the API: endpoint table lines, the decoded call, and the guarded run of a handler.

`Endpoint` is one line of the route table; everything that is said about a route (method, path, shapes, success
codes, whether it changes anything) is said there once, and `openapi` reads it too. `run` is what every request goes
through: key, body, decoding, budget, disconnect, error table, log.

Cancellation. Neither uvicorn nor Starlette cancels a handler when its client goes away: uvicorn only offers an
`http.disconnect` message, which nobody reads. So `run` reads it and cancels the handler of a changing request; the
node then finishes or undoes what it began, as its interface promises. Nothing is shielded here, with one
exception: a create with an Idempotency-Key runs to its end, because its answer is for the client's next attempt
(see `idempotency`). A `Streamed` answer does its work while it is sent and keeps the same rule by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from agentenv.api import errors
from agentenv.api.idempotency import Idempotency
from agentenv.api.keys import ApiKeys
from agentenv.api.log import log
from agentenv.api.settings import ApiSettings
from agentenv.api.wire import encode
from agentenv.clock import Clock
from agentenv.errors import AenvError, InvalidRequest
from agentenv.model import new_build_id
from agentenv.node.interface import NodeInterface

if TYPE_CHECKING:
    from agentenv.api.builds import TemplateBuilder
    from agentenv.api.images import ImageService
    from agentenv.api.storage import StorageService

B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """What all requests of one app share."""

    node: NodeInterface
    keys: ApiKeys
    settings: ApiSettings
    idempotency: Idempotency
    clock: Clock
    builder: TemplateBuilder | None = None
    images: ImageService | None = None
    storage: StorageService | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[B]):
    """One decoded request. `params` are path segments, percent-decoded after the path was split."""

    context: Context
    params: Mapping[str, str]
    query: QueryParams
    headers: Headers
    raw_body: bytes
    body: B

    @property
    def node(self) -> NodeInterface:
        """The node that the app was made for."""
        return self.context.node

    @property
    def settings(self) -> ApiSettings:
        """The app's settings."""
        return self.context.settings

    @property
    def now_s(self) -> float:
        """Unix seconds."""
        return self.context.clock.wall()


JSON: Final = "application/json"

Handler = Callable[[Call[B]], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    """One route. `results` maps each success status to the shape of its body (None: no body)."""

    operation: str
    method: str
    path: str
    handler: Handler[B]
    body: type[B]
    results: Mapping[int, Any]
    query: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    authenticated: bool = True
    # Its own time budget; None: that of every request.
    budget_s: float | None = None
    # The shape of one line where the client may ask for progress as NDJSON; None where it may not.
    lines: Any = None
    # Of a success; anything but JSON has no shape in `results`.
    media_type: str = JSON

    @property
    def mutates(self) -> bool:
        """Whether it changes something: it is logged, and ended when its client goes away."""
        return self.method != "GET"


def json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A success with a body."""
    return Response(encode(value), status, dict(headers or {}), media_type=JSON)


def no_content() -> Response:
    """204, which must have no body."""
    return Response(status_code=204)


Ended = Callable[[int, BaseException | None], None]


class Streamed(Response):
    """A success that does its work while it is sent, so its outcome is known only at the end of `__call__`.

    `run` arms it with what it knows of the route; the stream keeps to the budget and tells how it ended.
    """

    operation: str
    budget_s: float
    ended: Ended

    def arm(self, operation: str, budget_s: float, ended: Ended) -> None:
        """`ended` takes the status that the outcome has in the error table, and the error if there was one."""
        self.operation, self.budget_s, self.ended = operation, budget_s, ended


async def run(endpoint: Endpoint[Any], context: Context, request: Request, params: Mapping[str, str]) -> Response:
    """Answer one request; raises nothing but cancellation."""
    began = context.clock.monotonic()
    failure: BaseException | None = None
    try:
        response = await _guarded(endpoint, context, request, params)
    except AenvError as error:
        failure, response = error, errors.error_response(error)
    except Exception as error:
        failure, response = error, internal_error_response(endpoint.operation, error)

    def ended(status: int, failure: BaseException | None) -> None:
        if endpoint.mutates or status >= 500:
            duration_ms = (context.clock.monotonic() - began) * 1_000
            _log_request(endpoint.operation, params, status, duration_ms, failure)

    if isinstance(response, Streamed):
        response.arm(endpoint.operation, endpoint.budget_s or context.settings.request_s_max, ended)
    else:
        ended(response.status_code, failure)
    return response


def _log_request(
    operation: str, params: Mapping[str, str], status: int, duration_ms: float, failure: BaseException | None
) -> None:
    log.info(
        "request",
        operation=operation,
        status=status,
        duration_ms=round(duration_ms, 3),
        target=next(iter(params.values()), None),
        error=type(failure).__name__ if failure is not None else None,
        reason=str(failure)[:500] if isinstance(failure, AenvError) else None,
    )


def internal_error(operation: str, error: Exception) -> errors.InternalError:
    """What the client is told of a bug of ours: the id to find it by in the log, which has everything."""
    incident = new_build_id()
    log.error("bug", operation=operation, incident=incident, exc_info=error)
    return errors.InternalError(f"internal error; the server's log has it as {incident}")


def internal_error_response(operation: str, error: Exception) -> Response:
    """500 for a bug of ours."""
    return errors.error_response(internal_error(operation, error))


async def _guarded(endpoint: Endpoint[Any], context: Context, request: Request, params: Mapping[str, str]) -> Response:
    if endpoint.authenticated:
        context.keys.check(request.headers)
    raw = await _read_body(request, context.settings) if endpoint.mutates and endpoint.body is not NoBody else b""
    call = Call(
        context=context,
        params=params,
        query=request.query_params,
        headers=request.headers,
        raw_body=raw,
        body=_decode(raw, endpoint.body),
    )
    if not endpoint.mutates:
        return await endpoint.handler(call)
    return await _within_budget(
        endpoint.handler(call), request.receive, endpoint.budget_s or context.settings.request_s_max
    )


class NoBody(msgspec.Struct, frozen=True):
    """The body type of endpoints that read none; what a client sends is left unread."""


_NO_BODY = NoBody()


def _decode(raw: bytes, shape: type[B]) -> B:
    """Decode a JSON body; an empty one, and `null`, mean an object without keys."""
    if shape is NoBody:
        return _NO_BODY  # type: ignore[return-value]
    text = raw.strip()
    try:
        return msgspec.json.decode(b"{}" if text in (b"", b"null") else text, type=shape)
    except msgspec.ValidationError as error:
        # The message names the place as `$.timeout`.
        raise InvalidRequest(f"invalid request body: {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("request body is nested too deeply") from error


async def _read_body(request: Request, settings: ApiSettings) -> bytes:
    """The whole body, within the limits of size and time. Chunked bodies carry no length, so both are counted."""
    declared = request.headers.get("content-length", "")
    limit = settings.body_bytes_max
    too_large = errors.PayloadTooLarge(f"request body is larger than {limit} bytes")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_read_s_max):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        raise errors.BodyTooSlow(f"request body did not arrive within {settings.body_read_s_max:g} seconds") from error
    except ClientDisconnect as error:
        raise errors.ClientGone("the client closed the connection while sending its body") from error
    return bytes(body)


async def _within_budget(work: Awaitable[Response], receive: Receive, budget_s: float) -> Response:
    """Run `work` until it ends, its client goes away, or the budget is used up.

    In the latter two cases `work` is cancelled and awaited. Safe to cancel: cancels `work` too.
    """
    async with beside_client(work, receive) as (task, gone):
        await either(task, gone, budget_s)
        return await settled(task, gone, budget_s)


@contextlib.asynccontextmanager
async def beside_client(
    work: Awaitable[T], receive: Receive
) -> AsyncIterator[tuple[asyncio.Future[T], asyncio.Future[None]]]:
    """`work` as a task, and a second one that ends when the client goes away.

    Both have ended after the block: what still runs then is cancelled and awaited.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        yield task, gone
    finally:
        task.cancel()
        gone.cancel()
        both: set[asyncio.Future[Any]] = {task, gone}
        await asyncio.wait(both)
        for ended in both:
            if not ended.cancelled():
                # Look at it, or asyncio complains about an exception that nobody retrieved.
                ended.exception()


async def either(task: asyncio.Future[Any], gone: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until one of the two is done, or for `timeout_s`."""
    await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def settled(task: asyncio.Future[T], gone: asyncio.Future[None], budget_s: float) -> T:
    """The result of a task for which nobody waits any longer: it is cancelled unless it is done.

    Raises what the task raised, `ClientGone`, or `BudgetExceeded` when it neither ended nor lost its client.
    """
    if task.done():
        return await task
    left = gone.done()
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and not left:
        # It ended in the very moment of the cancel; the answer is the truth.
        return await task
    if left:
        raise errors.ClientGone("the client closed the connection before the answer")
    raise errors.BudgetExceeded(f"the request was not done within {budget_s:g} seconds and was given up")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
