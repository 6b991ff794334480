"""Connect RPC in JSON towards the guest daemon: unary calls and server streams of one sandbox.

Owns the headers that route and authorize a call. Does not know what the messages mean.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import httpx

from agentenv.client import envelope
from agentenv.client.errors import (
    BY_CONNECT_CODE,
    ApiError,
    ConnectionLost,
    ProtocolError,
    from_connect,
)
from agentenv.client.transport import Transport, error_of, peer_of, received
from agentenv.client.values import Json, as_object

ENVD_PORT: Final = 49983
UNARY_READ_TIMEOUT_S: Final = 60.0
KEEPALIVE_INTERVAL_S: Final = 30
# A live daemon sends a keepalive at each interval, so three missed ones mean that nobody is there any more.
STREAM_IDLE_TIMEOUT_S: Final = 3.0 * KEEPALIVE_INTERVAL_S


class GuestChannel:
    """Calls to the daemon of one sandbox."""

    def __init__(self, transport: Transport, base_url: str, sandbox_id: str, access_token: str | None) -> None:
        self.transport = transport
        self.base_url = base_url
        self.sandbox_id = sandbox_id
        self._headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if access_token:
            self._headers["X-Access-Token"] = access_token

    def headers(self, user: str | None = None) -> dict[str, str]:
        """Routing and authorization; without `user` the daemon takes its default user."""
        if user is None:
            return dict(self._headers)
        basic = base64.b64encode(f"{user}:".encode()).decode()
        return {**self._headers, "Authorization": f"Basic {basic}"}

    async def call(
        self,
        procedure: str,
        message: Json,
        *,
        user: str | None = None,
        read_timeout_s: float | None = UNARY_READ_TIMEOUT_S,
    ) -> Json:
        """One unary call. Raises the class of the Connect code, `TransportError` classes, `ProtocolError`."""
        url = f"{self.base_url}/{procedure}"
        answer = await self.transport.request(
            "POST",
            url,
            headers={**self.headers(user), "Connect-Protocol-Version": "1"},
            expect=_EVERY_STATUS,
            idempotent=False,
            body=message,
            read_timeout_s=read_timeout_s,
        )
        if answer.status_code == 200:
            return as_object(_json(answer.content), procedure)
        raise _unary_error(answer, url)

    @contextlib.asynccontextmanager
    async def stream(
        self, procedure: str, message: Json, *, user: str | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncGenerator[Json, None]]:
        """A server stream: yields an iterator of its messages that ends at the end frame.

        `timeout_s` is kept by the daemon, which kills the process then and ends with `DeadlineExceeded`. The iterator
        raises the class of the end frame's error, or `ConnectionLost` when the stream stops without an end frame.
        """
        headers = {
            **self.headers(user),
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": str(KEEPALIVE_INTERVAL_S),
        }
        if timeout_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, round(timeout_s * 1000)))
        async with self.transport.stream(
            "POST",
            f"{self.base_url}/{procedure}",
            headers=headers,
            content=envelope.encode(json.dumps(message).encode()),
            read_timeout_s=STREAM_IDLE_TIMEOUT_S,
        ) as answer:
            messages = _messages(answer)
            try:
                yield messages
            finally:
                await messages.aclose()


_EVERY_STATUS: Final = range(100, 600)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ProtocolError("the guest daemon's answer is not JSON") from error


def _unary_error(answer: httpx.Response, url: str) -> Exception:
    """By the Connect code where the body has one (a word), else as any HTTP error (of the proxy: a number)."""
    try:
        data = json.loads(answer.content)
    except ValueError:
        data = None
    if isinstance(data, dict) and data.get("code") in BY_CONNECT_CODE:
        return from_connect(data["code"], str(data.get("message", data["code"])), answer.status_code)
    return error_of(answer, answer.content, peer_of(url))


async def _messages(answer: httpx.Response) -> AsyncGenerator[Json, None]:
    """The messages of a stream until its end frame."""
    decoder = envelope.Decoder()
    async for piece in received(answer):
        for flags, message in decoder.feed(piece):
            if flags & envelope.FLAG_END:
                error = end_error(message)
                if error is not None:
                    raise error
                return
            yield as_object(_json(message), "stream message")
    cut = f" in the middle of a message ({decoder.pending} bytes of it arrived)" if decoder.pending else ""
    raise ConnectionLost(f"the stream from the sandbox ended without its end frame{cut}")


def end_error(message: bytes) -> ApiError | None:
    """The error of an end frame, None when the stream ended well. Raises `ProtocolError`."""
    data = as_object(_json(message) if message else {}, "end frame")
    error = data.get("error")
    if error is None:
        return None
    details = as_object(error, "end frame error")
    code = str(details.get("code", "unknown"))
    return from_connect(code, str(details.get("message") or code))
