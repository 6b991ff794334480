"""The control plane's calls about snapshots and templates, which are the same thing with and without names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import quote

from agentenv.client.api import Api
from agentenv.client.sandboxes import PAGE_ITEMS_MAX, pages
from agentenv.client.values import SnapshotInfo, TemplateInfo, as_list

# A first build downloads and unpacks a distribution and boots it.
BUILD_S_MAX: Final = 3700.0


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

    async def build(
        self,
        name: str,
        *,
        image: str | None = None,
        cpu_count: int | None = None,
        memory_mb: int | None = None,
        disk_size_mb: int | None = None,
    ) -> TemplateInfo:
        """Build a template; returns when it can be used. `image` is a raw ext4 image on the node's own disk."""
        asked = {"image": image, "cpuCount": cpu_count, "memoryMB": memory_mb, "diskSizeMB": disk_size_mb}
        body = {"name": name, **{key: value for key, value in asked.items() if value is not None}}
        answer = await self._api.call("POST", "/aenv/templates", 201, body=body, read_timeout_s=BUILD_S_MAX)
        return TemplateInfo.of(answer.data)

    async def delete(self, reference: str) -> None:
        """Delete one by id or name. Raises `NotFound`."""
        await self._api.call("DELETE", f"/templates/{quote(reference, safe='')}", 204, idempotent=True)
