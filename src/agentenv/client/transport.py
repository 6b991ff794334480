"""One HTTP connection pool for the API and for the sandboxes: limits, retries, and errors by class.

Owns every use of httpx's exceptions. Decides nothing about what is asked: callers name the path, the answer they
expect and whether the call may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from agentenv import __version__
from agentenv.client.errors import (
    ConfigurationError,
    ConnectionFailed,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    from_answer,
)

CONNECT_TIMEOUT_S: Final = 10.0
# A create, resume or snapshot waits in the node's queue; the proxy itself gives up after 120 s.
API_READ_TIMEOUT_S: Final = 150.0
WRITE_TIMEOUT_S: Final = 60.0
POOL_TIMEOUT_S: Final = 60.0
CONNECTIONS_MAX: Final = 100

RETRY_STATUSES: Final = frozenset({429, 503})
RETRIES_MAX: Final = 3
RETRY_WAIT_FIRST_S: Final = 0.2
RETRY_WAIT_MAX_S: Final = 10.0

ERROR_BODY_BYTES_MAX: Final = 64 * 1024
ERROR_MESSAGE_CHARS_MAX: Final = 2000

Sleep = Callable[[float], Awaitable[None]]


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn httpx's exceptions into ours, keeping the cause. `what` names the peer, as "the server at URL"."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ConnectionFailed(f"{what} did not accept a connection within {CONNECT_TIMEOUT_S:g} s") from error
    except httpx.TimeoutException as error:
        raise RequestTimeout(f"{what} did not answer in time ({type(error).__name__})") from error
    except (httpx.ConnectError, httpx.ProxyError) as error:
        raise ConnectionFailed(f"cannot connect to {what}: {str(error) or type(error).__name__}") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigurationError(f"{what}: the URL cannot be used: {error}") from error
    except (httpx.LocalProtocolError, httpx.DecodingError) as error:
        raise ProtocolError(f"{what}: {error}") from error
    except (httpx.TransportError, httpx.StreamError) as error:
        raise ConnectionLost(f"the connection to {what} broke: {str(error) or type(error).__name__}") from error


class Transport:
    """Sends requests; the only holder of the httpx client. Close it with `aclose`."""

    def __init__(
        self, *, http_transport: httpx.AsyncBaseTransport | None = None, tls: bool = True, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._sleep = sleep
        self._client = httpx.AsyncClient(
            transport=http_transport,
            # Loading the CA bundle costs 150 ms; a client that only talks plain http does without. The bare context
            # trusts nobody, so a mistake here fails closed.
            verify=True if tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            timeout=httpx.Timeout(
                connect=CONNECT_TIMEOUT_S, read=API_READ_TIMEOUT_S, write=WRITE_TIMEOUT_S, pool=POOL_TIMEOUT_S
            ),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
            # Streams must arrive as they are sent, so no compression is offered.
            headers={"User-Agent": f"aenv/{__version__}", "Accept-Encoding": "identity"},
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        """Close all connections; running streams fail."""
        await self._client.aclose()

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        expect: Collection[int],
        idempotent: bool,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        read_timeout_s: float | None = API_READ_TIMEOUT_S,
    ) -> httpx.Response:
        """One exchange, read completely. Repeats it after 429 and 503 only when `idempotent`.

        Raises `ApiError` classes for an answer outside `expect`, `TransportError` classes, `ProtocolError`.
        """
        peer = peer_of(url)
        content = None if body is None else json.dumps(body).encode()
        sent_headers = dict(headers)
        if content is not None:
            sent_headers["Content-Type"] = "application/json"
        for attempt in range(RETRIES_MAX + 1):
            with translated(peer):
                answer = await self._client.request(
                    method,
                    url,
                    params=params,
                    content=content,
                    headers=sent_headers,
                    timeout=_timeouts(read_timeout_s),
                )
            if answer.status_code in expect:
                return answer
            wait_s = retry_wait_s(answer, attempt) if idempotent else None
            if wait_s is None:
                raise error_of(answer, answer.content, peer)
            await self._sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        read_timeout_s: float | None,
        write_timeout_s: float | None = WRITE_TIMEOUT_S,
    ) -> AsyncIterator[httpx.Response]:
        """One exchange whose answer the caller reads; there is no limit on its whole duration.

        Raises like `request`, also while the caller reads; an answer other than 200 is an error.
        """
        peer = peer_of(url)
        with translated(peer):
            async with self._client.stream(
                method,
                url,
                params=params,
                content=content,
                headers=dict(headers),
                timeout=_timeouts(read_timeout_s, write_timeout_s),
            ) as answer:
                if answer.status_code != 200:
                    raise error_of(answer, await _read_some(answer), peer)
                yield answer


def _timeouts(read_s: float | None, write_s: float | None = WRITE_TIMEOUT_S) -> httpx.Timeout:
    return httpx.Timeout(connect=CONNECT_TIMEOUT_S, read=read_s, write=write_s, pool=POOL_TIMEOUT_S)


async def received(answer: httpx.Response, chunk_bytes: int | None = None) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises `TransportError` classes at the iteration, inside of `stream`'s context."""
    with translated(peer_of(str(answer.request.url))):
        async for piece in answer.aiter_raw(chunk_bytes):
            yield piece


async def _read_some(answer: httpx.Response) -> bytes:
    """The body of an error answer, cut at a limit so that no answer can fill the memory."""
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        if len(data) > ERROR_BODY_BYTES_MAX:
            break
    return bytes(data[:ERROR_BODY_BYTES_MAX])


def peer_of(url: str) -> str:
    """How messages name the other side: without path, so that no signature or token shows up."""
    parts = urlsplit(url)
    return f"the server at {parts.scheme}://{parts.netloc}"


def retry_wait_s(answer: httpx.Response, attempt: int) -> float | None:
    """How long to wait before attempt `attempt + 1`, None for no further attempt.

    The server's `Should-Retry: false` forbids it. A `Retry-After` above the limit also ends it: a caller who must
    wait longer than that should hear so at once.
    """
    if attempt >= RETRIES_MAX or answer.status_code not in RETRY_STATUSES:
        return None
    if answer.headers.get("should-retry", "").lower() == "false":
        return None
    asked_s = retry_after_s(answer)
    if asked_s is None:
        return min(RETRY_WAIT_FIRST_S * 2.0**attempt, RETRY_WAIT_MAX_S)
    return asked_s if asked_s <= RETRY_WAIT_MAX_S else None


def retry_after_s(answer: httpx.Response) -> float | None:
    """The seconds of a `Retry-After` header; None without one or in its date form, which our server never sends."""
    try:
        value = float(str(answer.headers.get("retry-after", "")))
    except ValueError:
        return None
    return value if 0 <= value < 86_400 else None


def error_of(answer: httpx.Response, body: bytes, peer: str) -> Exception:
    """The error for an answer: from its `{code, message}` body, or a `ProtocolError` when it has none.

    A server of this API always sends that body, so anything else is a proxy in between or another service.
    """
    status = answer.status_code
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("message"), str):
        known = from_answer(status, f"{peer} answered HTTP {status} without an error body", None)
        return known if status in (401, 403, 429, 502, 503, 504) else ProtocolError(str(known))
    error_code = data.get("error_code")
    return from_answer(
        status,
        data["message"][:ERROR_MESSAGE_CHARS_MAX],
        error_code if isinstance(error_code, str) else None,
        retry_after_s(answer),
    )
