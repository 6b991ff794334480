"""Images and storage without any, for tests of what stands on the API.

They keep the promises of `ImageService` and `StorageService` that a client can see and do nothing else. Before a call
answers it reports `steps`; `fail_next` makes the next call of a method raise, `hold` keeps calls waiting, and
`cancelled` names the methods whose caller went away meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from agentenv.errors import InvalidRequest, NotFound
from agentenv.model import (
    Damage,
    Dockerfile,
    ExportOptions,
    GcReport,
    ImageInfo,
    ImageReference,
    ImageSource,
    Progress,
    Report,
    Resources,
    SnapshotManifest,
    StorageReport,
    TierUsage,
    VerifyReport,
)

_GRACE_S = 3600.0


class _Fake:
    """What tests do to both."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cancelled: list[str] = []
        self.steps: list[Progress] = [Progress("reading", 1, 2)]
        self._failures: dict[str, Exception] = {}
        self._gates: dict[str, asyncio.Event] = {}

    def fail_next(self, method: str, error: Exception) -> None:
        """The next call of `method` raises `error`, after it reported its steps."""
        self._failures[method] = error

    def hold(self, method: str) -> asyncio.Event:
        """Calls of `method` wait, after their steps, until the returned event is set."""
        return self._gates.setdefault(method, asyncio.Event())

    async def _enter(self, method: str, report: Report | None = None) -> None:
        self.calls.append(method)
        for step in self.steps if report is not None else ():
            assert report is not None
            report(step)
        try:
            if (gate := self._gates.get(method)) is not None:
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(method)
            raise
        if (failure := self._failures.pop(method, None)) is not None:
            raise failure


class FakeImages(_Fake):
    """See the module. `add_template` is what makes a template known to the node (`FakeNode.add_template`)."""

    def __init__(self, add_template: Callable[[str], SnapshotManifest]) -> None:
        super().__init__()
        self.defaults = Resources(1, 512, 8_192)
        self.built: list[tuple[ImageSource, str | None, Resources]] = []
        self.exported: list[tuple[str, ExportOptions]] = []
        self.archive: list[bytes] = [b"an OCI ", b"archive"]
        # What reading the archive raises after its last piece.
        self.archive_failure: Exception | None = None
        self.open_exports = 0
        self._add_template = add_template
        self._images: dict[tuple[str, int], ImageInfo] = {}
        self._templates: dict[tuple[str, Resources], SnapshotManifest] = {}

    async def build(
        self, source: ImageSource, name: str | None, resources: Resources, report: Report
    ) -> SnapshotManifest:
        """See `ImageService`."""
        self.built.append((source, name, resources))
        await self._enter("build", report)
        if isinstance(source, Dockerfile):
            source = ImageReference(source.text.partition("FROM ")[2].partition("\n")[0])
        if not source.text:
            raise InvalidRequest("dockerfile: has no FROM")
        key = (source.text, resources)
        if name is None and key in self._templates:
            return self._templates[key]
        self._convert(source.text, resources.disk_mib)
        derived = "image-" + hashlib.sha256(source.text.encode()).hexdigest()[:12]
        made = self._add_template(name if name is not None else f"{derived}:default")
        self._templates[key] = made
        return made

    async def pull(self, reference: ImageReference, disk_mib: int, report: Report) -> ImageInfo:
        """See `ImageService`."""
        await self._enter("pull", report)
        return self._convert(reference.text, disk_mib)

    async def images(self) -> list[ImageInfo]:
        """See `ImageService`."""
        await self._enter("images")
        return list(self._images.values())

    async def remove(self, digest: str) -> None:
        """See `ImageService`."""
        await self._enter("remove")
        kept = {key: info for key, info in self._images.items() if info.digest != digest}
        if len(kept) == len(self._images):
            raise NotFound(f"image {digest} was not converted here")
        self._images = kept

    def export(self, snapshot: str, options: ExportOptions) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `ImageService`."""
        self.exported.append((snapshot, options))
        return self._exporting()

    @asynccontextmanager
    async def _exporting(self) -> AsyncIterator[AsyncIterator[bytes]]:
        self.open_exports += 1
        try:
            await self._enter("export")
            yield self._pieces()
        finally:
            self.open_exports -= 1

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in self.archive:
            yield piece
        await self._enter("read")
        if self.archive_failure is not None:
            raise self.archive_failure

    def _convert(self, reference: str, disk_mib: int) -> ImageInfo:
        digest = "sha256:" + hashlib.sha256(reference.encode()).hexdigest()
        known = self._images.get((digest, disk_mib))
        if known is None:
            created_at = 1_700_000_000.0 + len(self._images)
            known = ImageInfo((reference,), digest, ("a" * 64, digest[7:]), 3 << 20, disk_mib, created_at)
            self._images[digest, disk_mib] = known
        return known


class FakeStorage(_Fake):
    """See the module. `damages` is what a verify finds; a repair repairs those of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.damages: list[Damage] = []
        self.graces: list[float | None] = []
        staging = TierUsage("/var/lib/aenv/staging", 5 << 20, 2, garbage_bytes=1 << 20, free_bytes=7 << 30)
        repository = TierUsage("s3://bucket/aenv", 2 << 30, 40, shared_bytes=1 << 30, garbage_bytes=3 << 20)
        counters = {"hits": 90, "misses": 10, "bytes_from_store": 1 << 20}
        cache = TierUsage(
            "/var/lib/aenv/cache", 1 << 30, 9, size_bytes_max=4 << 30, free_bytes=7 << 30, counters=counters
        )
        self.report = StorageReport("oss", False, 3, staging, repository, cache)

    async def usage(self) -> StorageReport:
        """See `StorageService`."""
        await self._enter("usage")
        return self.report

    async def collect(self, grace_s: float | None) -> GcReport:
        """See `StorageService`."""
        self.graces.append(grace_s)
        await self._enter("collect")
        return GcReport(_GRACE_S if grace_s is None else grace_s, 4, 4 << 20, 1, 1 << 10, 2)

    async def verify(self, report: Report) -> VerifyReport:
        """See `StorageService`."""
        await self._enter("verify", report)
        return VerifyReport(51, 3 << 30, tuple(self.damages))

    async def repair(self, report: Report) -> VerifyReport:
        """See `StorageService`."""
        await self._enter("repair", report)
        repaired = tuple(dataclasses.replace(item, repaired=item.tier == "cache") for item in self.damages)
        self.damages = [item for item in repaired if not item.repaired]
        return VerifyReport(51, 3 << 30, repaired)
