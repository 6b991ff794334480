"""The control plane's calls about OCI images: pull, list, forget, and the export of a snapshot's disk as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from agentenv.client.api import Api
from agentenv.client.errors import RequestTimeout
from agentenv.client.progress import Progress, events, result_of
from agentenv.client.transport import peer_of
from agentenv.client.values import Json, as_list, as_object, integer, moment, text

# The server makes the whole archive before its first byte, and a large disk takes a while.
EXPORT_MAKE_S_MAX: Final = 6 * 3600.0
EXPORT_IDLE_S_MAX: Final = 120.0


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """An image that the server has converted for disks of one size; layers by id, bottom first."""

    references: tuple[str, ...]
    digest: str
    layers: tuple[str, ...]
    size_bytes: int
    disk_mib: int
    created_at: datetime | None
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> ImageInfo:
        """Raises `ProtocolError`."""
        data = as_object(value, "image")
        return cls(
            references=tuple(str(item) for item in as_list(data.get("references", []), "references")),
            digest=text(data, "digest"),
            layers=tuple(str(item) for item in as_list(data.get("layers", []), "layers")),
            size_bytes=integer(data, "sizeBytes", 0),
            disk_mib=integer(data, "diskSizeMB", 0),
            created_at=moment(data, "createdAt"),
            raw=data,
        )


class Images:
    """Images of one server. A reference may also name files on the server's own disk (`oci:/dir:tag`)."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self) -> list[ImageInfo]:
        """What the server has converted, newest first."""
        answer = await self._api.call("GET", "/aenv/images", 200, idempotent=True)
        return [ImageInfo.of(item) for item in as_list(answer.data, "/aenv/images")]

    def pull_events(
        self, reference: str, *, disk_size_mb: int | None = None
    ) -> AsyncGenerator[Progress | ImageInfo, None]:
        """Pull and convert an image: signs of progress, then the image."""
        body: dict[str, Any] = {"reference": reference}
        if disk_size_mb is not None:
            body["diskSizeMB"] = disk_size_mb
        return events(self._api, "/aenv/images", body, "image", ImageInfo.of)

    async def pull(
        self,
        reference: str,
        *,
        disk_size_mb: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> ImageInfo:
        """Pull and convert an image; returns when it is there. Raises `NotFound`, `BadRequest`, `ServerError`."""
        return await result_of(self.pull_events(reference, disk_size_mb=disk_size_mb), progress)

    async def delete(self, digest: str) -> None:
        """Forget a converted image; templates made of it stay. Raises `NotFound`."""
        await self._api.call("DELETE", f"/aenv/images/{quote(digest, safe='')}", 204, idempotent=True)

    @contextlib.asynccontextmanager
    async def export(
        self, snapshot: str, *, compression: str | None = None, reference: str | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The disk of a snapshot or template as an OCI archive (a tar), in pieces.

        `compression` of its layers is "none", "gzip" or "zstd". Raises `NotFound`, and `ConnectionLost` when the
        archive ends early.
        """
        asked = {"compression": compression, "reference": reference}
        body = {key: value for key, value in asked.items() if value is not None}
        path = f"/aenv/snapshots/{quote(snapshot, safe='')}/export"
        async with self._api.post(
            path, body=body, accept="application/x-tar, application/json", read_timeout_s=EXPORT_MAKE_S_MAX
        ) as pieces:
            yield _paced(pieces, peer_of(self._api.base_url))


async def _paced(pieces: AsyncIterator[bytes], peer: str) -> AsyncIterator[bytes]:
    """The pieces. Once an archive has begun, it may not stand still. Raises `RequestTimeout`."""
    limit_s: float | None = None
    while True:
        try:
            async with asyncio.timeout(limit_s):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise RequestTimeout(f"{peer} sent nothing of the archive for {limit_s:g} s") from error
        if piece is None:
            return
        yield piece
        limit_s = EXPORT_IDLE_S_MAX
