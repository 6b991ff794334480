"""Requests to registries: authorization, redirects, time-outs and repeats. The one place that calls httpx.

Owns what one request is; not what is asked (`registry`) nor the resuming of long bodies (`_download`). Foreign errors
end here: what may pass is `Transient`, and leaves as `RegistryError` once the policy gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx

from agentenv.clock import Clock
from agentenv.errors import ImageNotFound, RegistryDenied, RegistryError
from agentenv.images._auth import TOKEN_BYTES_MAX, Authenticator, TokenRefused
from agentenv.images._retry import RetryPolicy, Sleep, Transient, retry_after_s
from agentenv.images.endpoints import Endpoint, is_loopback

T = TypeVar("T")
REDIRECTS_MAX: Final = 5
CONNECTIONS_MAX: Final = 16
# Between two pieces of a body; a registry that is silent for longer is asked again from where it stopped.
_TIMEOUTS: Final = httpx.Timeout(connect=10.0, read=30.0, write=30.0, pool=60.0)
DOCUMENT_S_MAX: Final = 60.0
_ERROR_BODY_BYTES_MAX: Final = 4_096
_SUCCESS: Final = frozenset({200, 206})
_MAY_PASS: Final = frozenset({408, 429, 500, 502, 503, 504})
# What is said of loopback must not go through a proxy of the environment.
_NEVER_PROXIED: Final = ("all://localhost", "all://127.0.0.1", "all://[::1]")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: an address, by whom it is served, and of which repository (for the token's scope)."""

    endpoint: Endpoint
    repository: str
    url: str
    headers: Mapping[str, str]

    @property
    def what(self) -> str:
        """For messages: no query, which may hold a signature."""
        return self.url.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Document:
    """A small answer, read whole."""

    body: bytes
    headers: httpx.Headers


class RegistryHttp:
    """A pool of connections with the manners of the distribution specification. For one event loop."""

    def __init__(
        self,
        clock: Clock,
        retry: RetryPolicy,
        sleep: Sleep = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network in tests. Proxies and certificates come from the environment, as with
        every tool on the host."""
        self.clock = clock
        self.retry = retry
        self.sleep = sleep
        self._authenticator = Authenticator(clock)
        self._client = httpx.AsyncClient(
            transport=transport,
            mounts=None if transport is not None else dict.fromkeys(_NEVER_PROXIED),
            timeout=_TIMEOUTS,
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX),
            follow_redirects=False,
            headers={"User-Agent": "agentenv", "Accept-Encoding": "identity"},
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def document(self, request: Request, bytes_max: int) -> Document:
        """The whole body, repeated while the policy allows. Raises `ImageNotFound`, `RegistryError`."""

        async def once() -> Document:
            try:
                async with asyncio.timeout(DOCUMENT_S_MAX), self.open(request) as response:
                    return Document(await _read(response, bytes_max, request.what), response.headers)
            except TimeoutError as error:
                raise Transient(f"{request.what}: no answer within {DOCUMENT_S_MAX:.0f} s") from error

        return await self.repeated(once, request.endpoint)

    async def repeated(self, once: Callable[[], Awaitable[T]], endpoint: Endpoint) -> T:
        """Run `once` until it succeeds, is refused, or the policy ends. A mirror gets two attempts: others follow."""
        attempts = min(2, self.retry.attempts_max) if endpoint.is_mirror else self.retry.attempts_max
        until = self.clock.monotonic() + self.retry.deadline_s
        failures = 0
        while True:
            try:
                return await once()
            except Transient as error:
                failures += 1
                delay_s = self.retry.delay_s(failures, error.retry_after_s)
                if failures >= attempts or self.clock.monotonic() + delay_s > until:
                    raise RegistryError(f"{error} (given up after {failures} attempts)") from error
            await self.sleep(delay_s)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[httpx.Response]:
        """One attempt: the answer with its body still to be read. Raises `Transient`, `ImageNotFound`,
        `RegistryDenied` or `RegistryError`; also `Transient` for a body that breaks off inside the block."""
        try:
            response = await self._authorized(request)
            try:
                if response.status_code not in _SUCCESS:
                    await self._raise_for(response, request)
                yield response
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            # Names the kind where httpx has no words of its own (time-outs).
            raise Transient(f"{request.what}: {error or type(error).__name__}") from error
        except (httpx.InvalidURL, httpx.HTTPError, httpx.StreamError) as error:
            raise RegistryError(f"{request.what}: {error}") from error

    async def _authorized(self, request: Request) -> httpx.Response:
        endpoint, repository = request.endpoint, request.repository
        known = self._authenticator.known(endpoint, repository)
        response = await self._send(request, known)
        if response.status_code != 401:
            return response
        self._authenticator.forget(endpoint, repository)
        try:
            answer = await self._authenticator.answer(endpoint, repository, response, self._ask)
        except TokenRefused as error:
            await response.aclose()
            if error.status in _MAY_PASS:
                raise Transient(str(error)) from error
            raise RegistryDenied(f"{error} for {repository}{_with(endpoint)}") from error
        except BaseException:
            await response.aclose()
            raise
        if answer is None:
            return response
        await response.aclose()
        return await self._send(request, answer)

    async def _send(self, request: Request, authorization: str | None) -> httpx.Response:
        """Follows redirects by hand: what we are to the registry is nothing that its store for blobs should see."""
        url = httpx.URL(request.url)
        origin = _origin(url)
        for _ in range(REDIRECTS_MAX + 1):
            headers = dict(request.headers)
            if authorization is not None and _origin(url) == origin:
                headers["Authorization"] = authorization
            sent = self._client.build_request("GET", url, headers=headers)
            response = await self._client.send(sent, stream=True)
            location = response.headers.get("location")
            if not response.has_redirect_location or location is None:
                return response
            await response.aclose()
            url = response.url.join(location)
            _check_redirect(request, url)
        raise RegistryError(f"{request.what}: more than {REDIRECTS_MAX} redirects")

    async def _ask(
        self, method: str, url: str, fields: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """A token service; it never redirects, since a password is on its way."""
        if method == "POST":
            sent = self._client.build_request(method, url, data=dict(fields), headers=headers)
        else:
            # Merged by hand: httpx would replace a query that the realm has already.
            sent = self._client.build_request(method, httpx.URL(url).copy_merge_params(dict(fields)), headers=headers)
        response = await self._client.send(sent, stream=True)
        try:
            return response.status_code, await _read(response, TOKEN_BYTES_MAX, url.partition("?")[0])
        finally:
            await response.aclose()

    async def _raise_for(self, response: httpx.Response, request: Request) -> None:
        status = response.status_code
        said = await _error_text(response)
        message = f"{request.what}: answered {status}{said}"
        if status in _MAY_PASS:
            raise Transient(message, retry_after_s(response.headers.get("retry-after"), self.clock.wall()))
        if status == 404:
            raise ImageNotFound(message)
        if status in (401, 403):
            self._authenticator.forget(request.endpoint, request.repository)
            raise RegistryDenied(
                f"{request.endpoint.host} refuses {request.repository}{_with(request.endpoint)} ({status}{said})"
            )
        raise RegistryError(message)


def _with(endpoint: Endpoint) -> str:
    if endpoint.credentials is None:
        return " without credentials; a private image needs them, and some registries say so of missing ones too"
    return f" to {endpoint.credentials.username or 'the identity token'}"


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _check_redirect(request: Request, url: httpx.URL) -> None:
    if url.scheme == "http" and not request.endpoint.is_plain and not is_loopback(url.host):
        raise RegistryError(f"{request.what}: redirected to {url.host} without encryption; refused")
    if url.scheme not in ("http", "https"):
        raise RegistryError(f"{request.what}: redirected to {str(url)[:120]!r}, which is no web address")


async def _read(response: httpx.Response, bytes_max: int, what: str) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > bytes_max:
            raise RegistryError(f"{what}: more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)


async def _error_text(response: httpx.Response) -> str:
    """The first message of the registry's error body, for a person; decides nothing."""
    body = b""
    async for part in response.aiter_raw():
        body += part
        if len(body) > _ERROR_BODY_BYTES_MAX:
            return ""
    try:
        first = httpx.Response(200, content=body).json()["errors"][0]
        return f" ({str(first.get('message') or first.get('code'))[:200]})"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""
