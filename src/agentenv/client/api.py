"""One call of the control plane: URL, key, and the answer's JSON, or its body as it arrives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.client.errors import KeyRejected, ProtocolError, Unauthorized
from agentenv.client.transport import API_READ_TIMEOUT_S, Transport, peer_of, received


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, decoded body (None when empty) and the paging token of one answer."""

    status: int
    data: Any
    next_token: str | None


class Api:
    """Calls with the API key. The key goes to `base_url` only, never to a sandbox."""

    def __init__(self, transport: Transport, base_url: str, api_key: str | None) -> None:
        self.transport = transport
        self.base_url = base_url
        self._headers = {} if api_key is None else {"X-API-Key": api_key}

    async def call(
        self,
        method: str,
        path: str,
        *expect: int,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        idempotent: bool = False,
        read_timeout_s: float = API_READ_TIMEOUT_S,
    ) -> Answer:
        """Send and decode. Raises `ApiError`, `TransportError` classes, `ProtocolError`."""
        with _key_rejected():
            answer = await self.transport.request(
                method,
                self.base_url + path,
                headers={**self._headers, **(headers or {})},
                expect=expect,
                idempotent=idempotent,
                params=params,
                body=body,
                read_timeout_s=read_timeout_s,
            )
        try:
            data = json.loads(answer.content) if answer.content else None
        except ValueError as error:
            raise ProtocolError(f"{peer_of(self.base_url)}: the answer to {method} {path} is not JSON") from error
        return Answer(answer.status_code, data, answer.headers.get("x-next-token"))

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, *, body: Any, accept: str, read_timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST once and read the body as it arrives, for at most `read_timeout_s` without a byte. Raises as `call`."""
        headers = {**self._headers, "Accept": accept, "Content-Type": "application/json"}
        content = json.dumps({} if body is None else body).encode()
        with _key_rejected():
            async with self.transport.stream(
                "POST", self.base_url + path, headers=headers, content=content, read_timeout_s=read_timeout_s
            ) as answer:
                yield received(answer)


@contextlib.contextmanager
def _key_rejected() -> Iterator[None]:
    """A 401 of the control plane is about the key, which the transport cannot know."""
    try:
        yield
    except Unauthorized as error:
        raise KeyRejected(str(error), code=error.code, error_code=error.error_code) from error
