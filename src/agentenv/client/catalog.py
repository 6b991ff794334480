"""The control plane's calls about snapshots and templates, which are the same thing with and without names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from agentenv.client.api import Api
from agentenv.client.sandboxes import PAGE_ITEMS_MAX, pages
from agentenv.client.values import SnapshotInfo, TemplateInfo, as_list


class Snapshots:
    """Committed snapshots of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def iterate(self, *, sandbox_id: str | None = None) -> AsyncIterator[SnapshotInfo]:
        """All snapshots, or those of one sandbox, fetched page by page while they are used."""
        params = {"limit": str(PAGE_ITEMS_MAX)}
        if sandbox_id is not None:
            params["sandboxID"] = sandbox_id
        async for item in pages(self._api, "/snapshots", params):
            yield SnapshotInfo.of(item)

    async def delete(self, reference: str) -> None:
        """Delete one by id or name; sandboxes that run from it go on. Raises `NotFound`."""
        await self._api.call("DELETE", f"/templates/{quote(reference, safe='')}", 204, idempotent=True)


class Templates:
    """Templates of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self) -> list[TemplateInfo]:
        """All templates."""
        answer = await self._api.call("GET", "/templates", 200, idempotent=True)
        return [TemplateInfo.of(item) for item in as_list(answer.data, "/templates")]

    async def delete(self, reference: str) -> None:
        """Delete one by id or name. Raises `NotFound`."""
        await self._api.call("DELETE", f"/templates/{quote(reference, safe='')}", 204, idempotent=True)
