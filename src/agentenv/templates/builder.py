"""Builds templates: root file system -> layer -> cold boot -> ready -> snapshot.

Owns the order of the steps. Does not own the packages (`rootfs`), the conversion of OCI images (`images`), nor the boot
and the snapshot (`node`). A build that fails leaves a layer in staging that no record names, which the collector
removes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol

from agentenv.errors import ImageError, InvalidRequest, SandboxNotFound, TemplateNotFound
from agentenv.model import DiskStack, Resources, SnapshotManifest
from agentenv.snapshots import new_local_id, parse_reference
from agentenv.templates.rootfs import build_base_rootfs

BASE_NAME: Final = "base"
BASE_RESOURCES: Final = Resources(cpu_count=1, memory_mib=512, disk_mib=8192)
# The superblock's magic number (ext4 documentation, "The Super Block": s_magic at 0x38 of the block at 1024).
EXT4_MAGIC_OFFSET: Final = 1024 + 0x38
EXT4_MAGIC: Final = b"\x53\xef"
SECTOR_BYTES: Final = 512


class TemplateNode(Protocol):
    """What a build needs of the node."""

    def resolve_template(self, reference: str) -> SnapshotManifest: ...

    def check_fits(self, resources: Resources) -> None: ...

    async def build_template(
        self, name: str, disk: DiskStack, resources: Resources, image_config: dict[str, Any] | None = None
    ) -> SnapshotManifest: ...


class Importer(Protocol):
    """What a build needs of blockd."""

    async def import_raw(self, source: Path, into: Path) -> object: ...


class LocalLayers(Protocol):
    """What a build needs of the node's layers: a place for a new one, which no record names yet."""

    def local_path(self, layer_id: str) -> Path: ...

    def reserved(self, *ids: str) -> AbstractContextManager[None]: ...


class Builder:
    """Builds templates on one node, one at a time: a build boots a machine and writes gigabytes."""

    defaults: Final = BASE_RESOURCES

    def __init__(
        self,
        node: TemplateNode,
        block: Importer,
        layers: LocalLayers,
        cache_dir: Path,
        progress: Callable[[str], None],
    ) -> None:
        """`cache_dir` keeps the base root file system for the next build and the next node."""
        self._node = node
        self._block = block
        self._layers = layers
        self._cache_dir = cache_dir
        self._progress = progress
        self._one_at_a_time = asyncio.Lock()

    async def ensure_base(self) -> SnapshotManifest:
        """The `base` template, built if there is none yet."""
        try:
            return self._node.resolve_template(BASE_NAME)
        except TemplateNotFound:
            return await self.build(BASE_NAME, None, BASE_RESOURCES)

    async def build(self, name: str, image: Path | None, resources: Resources) -> SnapshotManifest:
        """Make a template of a raw ext4 image, or of the base packages (None).

        Raises `InvalidRequest` (a bad name or image, more memory than the node has) before anything is written, and
        `ImageError`, `BlockError`, `VmmError`, `GuestUnresponsive`.
        """
        parse_reference(name)
        self._node.check_fits(resources)
        async with self._one_at_a_time:
            if image is not None:
                return await self._from_image(name, image, resources, InvalidRequest)
            self._progress(f"template {name}: making its root file system")
            image = await build_base_rootfs(self._cache_dir, resources.disk_mib, self._progress)
            return await self._from_image(name, image, resources, ImageError)

    async def build_from_disk(
        self, name: str, disk: DiskStack, resources: Resources, image_config: dict[str, Any], what: str
    ) -> SnapshotManifest:
        """Make a template of a disk that is there as layers: those of a converted OCI image, called `what`.

        The caller holds the layers meanwhile. Raises as `build`; an image that does not boot is an `ImageError`.
        """
        self._node.check_fits(resources)
        async with self._one_at_a_time:
            return await self._from_disk(name, disk, resources, image_config, what, ImageError)

    async def _from_image(
        self, name: str, image: Path, resources: Resources, unbootable: type[InvalidRequest | ImageError]
    ) -> SnapshotManifest:
        size_bytes = await asyncio.to_thread(_checked_size, image)
        layer = new_local_id()
        with self._layers.reserved(layer):
            self._progress(f"template {name}: importing {image.name} as a layer")
            await self._block.import_raw(image, self._layers.local_path(layer))
            disk = DiskStack(size_bytes, (layer,))
            return await self._from_disk(name, disk, resources, None, str(image), unbootable)

    async def _from_disk(
        self,
        name: str,
        disk: DiskStack,
        resources: Resources,
        image_config: dict[str, Any] | None,
        what: str,
        unbootable: type[InvalidRequest | ImageError],
    ) -> SnapshotManifest:
        """`unbootable` is raised when the machine ends during its first boot: whose fault a bad image is."""
        try:
            self._progress(f"template {name}: first boot")
            manifest = await self._node.build_template(name, disk, resources, image_config)
        except SandboxNotFound as error:
            # Nobody else knows the machine, so it ended by itself: PID 1 found no root file system that it can mount.
            raise unbootable(f"image: {what} does not boot: its machine ended before the guest was ready") from error
        self._progress(f"template {name}: ready ({manifest.snapshot_id})")
        return manifest


def _checked_size(image: Path) -> int:
    """The image's size in bytes. Raises `InvalidRequest` for what cannot be an ext4 image."""
    try:
        with image.open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(EXT4_MAGIC_OFFSET)
            magic = file.read(2)
    except OSError as error:
        raise InvalidRequest(f"image: {image} cannot be read: {error.strerror}") from error
    if magic != EXT4_MAGIC or size_bytes % SECTOR_BYTES:
        raise InvalidRequest(f"image: {image} is not a raw ext4 image of whole sectors")
    return size_bytes
