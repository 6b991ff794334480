"""OCI images on this node: pulled, converted, made into templates, listed, removed and exported. The API's images.

Owns the order of the steps and that each is done once for however many ask. Does not own registries, conversion and
archives (`images`), nor the first boot (`templates`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agentenv.clock import Clock
from agentenv.errors import ImageNotFound, InvalidRequest, TemplateNotFound
from agentenv.images import (
    AcceleratedImage,
    Converter,
    ExportJob,
    Image,
    ImageConfig,
    ImageProgram,
    LocalReference,
    RegistryClient,
    RegistryReference,
    RegistrySource,
    RepositoryLayers,
    WholeLayers,
    dockerfile_base,
    export_archive,
    find_accelerated,
    open_source,
    parse_config,
    parse_reference,
    store_entry,
)
from agentenv.images import Source as OpenSource
from agentenv.model import (
    Blob,
    DiskStack,
    Dockerfile,
    ExportOptions,
    ImageInfo,
    ImageReference,
    ImageSource,
    Progress,
    Report,
    Resources,
    SnapshotManifest,
)
from agentenv.node.layers import Layers
from agentenv.node.node import Node
from agentenv.server.image_records import ImageRecords
from agentenv.server.shared_work import SharedWork
from agentenv.server.stores import StoresFile
from agentenv.templates.builder import BASE_RESOURCES, Builder

_PIECE_BYTES: Final = 1 << 20
_SLUG_CHARS_MAX: Final = 40


class Images:
    """See `api.images.ImageService`. One event loop."""

    defaults: Final = BASE_RESOURCES

    def __init__(
        self,
        node: Node,
        layers: Layers,
        builder: Builder,
        records: ImageRecords,
        local_layers: RepositoryLayers,
        converter: Converter,
        whole_layers: WholeLayers,
        program: ImageProgram,
        client: RegistryClient,
        stores: StoresFile,
        staging_dir: Path,
        clock: Clock,
    ) -> None:
        """`staging_dir` is the conversions' and exports' own; whatever a former server left there is removed."""
        self._node = node
        self._layers = layers
        self._builder = builder
        self._records = records
        self._local_layers = local_layers
        self._converter = converter
        self._whole_layers = whole_layers
        self._program = program
        self._client = client
        self._stores = stores
        self._staging_dir = staging_dir
        self._clock = clock
        self._builds: SharedWork[SnapshotManifest] = SharedWork()
        self._pulls: SharedWork[ImageInfo] = SharedWork()
        shutil.rmtree(staging_dir, ignore_errors=True)

    async def close(self) -> None:
        """End what is under way."""
        await self._builds.close()
        await self._pulls.close()
        await self._client.aclose()

    async def build(
        self, source: ImageSource, name: str | None, resources: Resources, report: Report
    ) -> SnapshotManifest:
        """See `ImageService.build`."""
        reference = _reference_of(source)
        key = f"{reference} {name} {resources}"

        async def work(tell: Report) -> SnapshotManifest:
            return await self._build(reference, name, resources, tell)

        return await self._builds.run(key, report, work)

    async def pull(self, reference: ImageReference, disk_mib: int, report: Report) -> ImageInfo:
        """See `ImageService.pull`."""
        parsed = parse_reference(reference.text)

        async def work(tell: Report) -> ImageInfo:
            async with self._disk_of(parsed, disk_mib, tell) as (_, _, info):
                return info

        return await self._pulls.run(f"{parsed} {disk_mib}", report, work)

    async def images(self) -> list[ImageInfo]:
        """See `ImageService.images`."""
        return await self._records.all()

    async def remove(self, digest: str) -> None:
        """See `ImageService.remove`."""
        if not await self._records.forget(digest):
            raise ImageNotFound(f"no image {digest} was converted here")
        self._node.collect_soon()

    def export(self, snapshot: str, options: ExportOptions) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `ImageService.export`."""
        return self._export(snapshot, options)

    # Inside

    async def _build(
        self, reference: RegistryReference | LocalReference, name: str | None, resources: Resources, report: Report
    ) -> SnapshotManifest:
        self._node.check_fits(resources)
        if name is None:
            report(Progress(f"asking what {reference} is"))
            async with self._opened(reference) as (_, image):
                name = _derived_name(reference, image.digest, resources)
            try:
                return await self._node.find_template(name)
            except TemplateNotFound:
                pass
        async with self._disk_of(reference, resources.disk_mib, report) as (disk, config, _):
            report(Progress(f"first boot of {reference}"))
            fitted = replace(resources, disk_mib=disk.size_bytes >> 20)
            return await self._builder.build_from_disk(name, disk, fitted, config, str(reference))

    @asynccontextmanager
    async def _disk_of(
        self, reference: RegistryReference | LocalReference, disk_mib: int, report: Report
    ) -> AsyncIterator[tuple[DiskStack, dict[str, Any], ImageInfo]]:
        """The image as a disk, its configuration and its entry in the list; the layers stay while the block lasts."""
        async with self._opened(reference) as (source, _):
            accelerated = await find_accelerated(source) if isinstance(source, RegistrySource) else None
            if accelerated is not None:
                disk = await self._on_demand(accelerated, source, report)
                config, digest = accelerated.config, accelerated.manifest_digest
            else:
                made = await self._converter.convert(source, disk_mib, report)
                disk, config, digest = made.disk, made.config, made.manifest_digest
        with self._layers.reserved(*disk.layers):
            await self._layers.hold(disk.layers)
            blobs = [self._layers.repository.blob(layer) for layer in disk.layers]
            info = ImageInfo(
                references=(str(reference),),
                digest=digest,
                layers=disk.layers,
                size_bytes=sum(blob.size_bytes for blob in blobs if blob is not None),
                disk_mib=disk.size_bytes >> 20,
                created_at=self._clock.wall(),
            )
            if accelerated is None or not accelerated.is_all_remote:
                await self._records.remember(info)
            yield disk, json.loads(config.raw), info

    async def _on_demand(self, image: AcceleratedImage, source: OpenSource, report: Report) -> DiskStack:
        """An image whose layers a registry holds in our format: guests read them from there.

        Only what could not be verified then is fetched now, and is a layer of the repository.
        """
        assert isinstance(source, RegistrySource)
        self._stores.add_registry(source.reference.registry, store_entry(source.reference, self._client.settings))
        self._layers.repository.know(
            Blob(
                digest=blob.layer_id,
                size_bytes=blob.size_bytes,
                plain_digest=blob.layer_id,
                plain_size_bytes=blob.size_bytes,
                origin=blob.source(),
            )
            for blob in image.blobs
            if blob.has_checksums
        )
        layers = [
            blob.layer_id if blob.has_checksums else await self._whole_layers.layer_id(source, blob, report)
            for blob in image.blobs
        ]
        return DiskStack(image.disk_bytes, tuple(layers))

    @asynccontextmanager
    async def _opened(self, reference: RegistryReference | LocalReference) -> AsyncIterator[tuple[OpenSource, Image]]:
        source = open_source(reference, self._client)
        try:
            yield source, await source.image()
        finally:
            await source.aclose()

    @asynccontextmanager
    async def _export(self, snapshot: str, options: ExportOptions) -> AsyncIterator[AsyncIterator[bytes]]:
        manifest = await self._node.find_template(snapshot)
        folder = self._staging_dir / f"export-{secrets.token_hex(8)}"
        archive = folder / "image.tar"
        await asyncio.to_thread(folder.mkdir, parents=True, mode=0o700)
        try:
            async with self._node.settled_disk(manifest) as disk:
                layers = [await self._local_layers.local_file(layer, folder) for layer in disk.layers]
                job = ExportJob(
                    layers=tuple(layers),
                    size_bytes=disk.size_bytes,
                    config=_config_of(manifest),
                    compression=options.compression,
                    reference=options.reference,
                    comment=f"snapshot {manifest.snapshot_id}",
                )
                await export_archive(self._program, job, archive, lambda _: None)
            yield _pieces(archive)
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


def _reference_of(source: ImageSource) -> RegistryReference | LocalReference:
    """Raises `InvalidRequest` for what is no reference, and for a Dockerfile that begins from nothing."""
    if isinstance(source, ImageReference):
        return parse_reference(source.text)
    assert isinstance(source, Dockerfile)
    base = dockerfile_base(source.text, source.build_args)
    if base.reference is None:
        raise InvalidRequest(f"Dockerfile: line {base.line}: FROM scratch is an empty image, which nothing can run in")
    return base.reference


def _derived_name(reference: RegistryReference | LocalReference, digest: str, resources: Resources) -> str:
    """The same image with the same resources has the same name, whatever tag it was asked for by."""
    sizes = f"{resources.cpu_count} {resources.memory_mib} {resources.disk_mib}"
    mark = hashlib.sha256(f"{digest} {sizes}".encode()).hexdigest()[:12]
    last = str(reference).partition("@")[0].rstrip("/").rpartition("/")[2].partition(":")[0]
    slug = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_SLUG_CHARS_MAX] or "image"
    return f"{slug}-{mark}"


def _config_of(manifest: SnapshotManifest) -> ImageConfig | None:
    if not manifest.image_config:
        return None
    return parse_config(json.dumps(manifest.image_config).encode(), f"snapshot {manifest.snapshot_id}")
