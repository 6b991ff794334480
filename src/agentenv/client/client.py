"""`AenvClient`: the entry point of the library."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import httpx

from agentenv.client.api import Api
from agentenv.client.catalog import Snapshots, Templates
from agentenv.client.credentials import Credentials, checked_key, checked_url, resolve
from agentenv.client.images import Images
from agentenv.client.sandboxes import Sandboxes
from agentenv.client.storage import Storage
from agentenv.client.transport import Sleep, Transport
from agentenv.client.values import as_object


class AenvClient:
    """A server and a key. Use as `async with AenvClient() as client`.

    Without arguments the URL and the key come from AENV_API_URL and AENV_API_KEY, else E2B_API_URL and E2B_API_KEY,
    else the file of `aenv auth`. `sandbox_url` is where sandboxes are reached, by default the same address.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        *,
        sandbox_url: str | None = None,
        credentials: Credentials | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Raises `ConfigurationError`. `http_transport` and `sleep` are for tests."""
        if credentials is None:
            credentials = resolve(
                api_url=None if api_url is None else checked_url(api_url, "api_url"),
                api_key=None if api_key is None else checked_key(api_key, "api_key"),
                sandbox_url=sandbox_url,
            )
        self.credentials = credentials
        tls = any(url.startswith("https:") for url in (credentials.api_url, credentials.sandbox_url))
        self._transport = Transport(http_transport=http_transport, tls=tls, sleep=sleep)
        self._api = Api(self._transport, credentials.api_url, credentials.api_key)
        self.sandboxes = Sandboxes(self._api, credentials.sandbox_url)
        self.snapshots = Snapshots(self._api)
        self.templates = Templates(self._api)
        self.images = Images(self._api)
        self.storage = Storage(self._api)

    async def node(self) -> dict[str, Any]:
        """What the node says of itself: driver, accelerator, counts by state, capacity."""
        answer = await self._api.call("GET", "/aenv/node", 200, idempotent=True)
        return dict(as_object(answer.data, "node"))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
