"""The control plane's calls about snapshots and templates, which are the same thing with and without names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Final, TypedDict, Unpack
from urllib.parse import quote

from agentenv.client.api import Api
from agentenv.client.progress import Progress, events, result_of
from agentenv.client.sandboxes import PAGE_ITEMS_MAX, pages
from agentenv.client.values import SnapshotInfo, TemplateInfo, as_list


class BuildOptions(TypedDict, total=False):
    """What a template is made of, and its size; None is as good as absent. Sizes are MiB.

    `image` is an image reference, or the absolute path of a raw ext4 image on the server's own disk; `dockerfile` is
    the text of one, whose FROM names the image; without both the base packages are used.
    """

    image: str | None
    dockerfile: str | None
    build_args: Mapping[str, str] | None
    cpu_count: int | None
    memory_mb: int | None
    disk_size_mb: int | None


_BUILD_FIELDS: Final = {
    "image": "image",
    "dockerfile": "dockerfile",
    "build_args": "buildArgs",
    "cpu_count": "cpuCount",
    "memory_mb": "memoryMB",
    "disk_size_mb": "diskSizeMB",
}


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

    def build_events(
        self, name: str | None = None, **options: Unpack[BuildOptions]
    ) -> AsyncGenerator[Progress | TemplateInfo, None]:
        """Build a template: signs of progress, then the template.

        An image reference needs no name: the template that was made of it before, with the same resources, is then
        answered.
        """
        asked: dict[str, Any] = {"name": name, **{_BUILD_FIELDS[key]: value for key, value in options.items()}}
        body = {key: value for key, value in asked.items() if value is not None}
        return events(self._api, "/aenv/templates", body, "template", TemplateInfo.of)

    async def build(
        self,
        name: str | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[BuildOptions],
    ) -> TemplateInfo:
        """Build a template, as `build_events`; returns when it can be used.

        Raises `BadRequest`, `NotFound` (no such image), `StorageFull`, `ServerError`.
        """
        return await result_of(self.build_events(name, **options), progress)

    async def delete(self, reference: str) -> None:
        """Delete one by id or name. Raises `NotFound`."""
        await self._api.call("DELETE", f"/templates/{quote(reference, safe='')}", 204, idempotent=True)
