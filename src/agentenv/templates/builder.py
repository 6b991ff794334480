"""Builds the `base` template: root file system -> layer -> cold boot -> ready -> snapshot.

Owns the order of the steps. Does not own the packages (`rootfs`), nor the boot and the snapshot (`node`). A build that
fails leaves a layer in the repository that no record names, which the collector removes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from agentenv.errors import TemplateNotFound
from agentenv.model import DiskStack, Resources, SnapshotManifest
from agentenv.snapshots import Repository, new_layer_id
from agentenv.templates.rootfs import build_base_rootfs

BASE_NAME: Final = "base"
BASE_RESOURCES: Final = Resources(cpu_count=1, memory_mib=512, disk_mib=8192)


class TemplateNode(Protocol):
    """What a build needs of the node."""

    def resolve_template(self, reference: str) -> SnapshotManifest: ...

    async def build_template(self, name: str, disk: DiskStack, resources: Resources) -> SnapshotManifest: ...


class Importer(Protocol):
    """What a build needs of blockd."""

    async def import_raw(self, source: Path, into: Path) -> object: ...


class Reservations(Protocol):
    """What a build needs of the node's bookkeeping: layers that no record names yet."""

    reserved_layers: set[str]


async def ensure_base(
    node: TemplateNode,
    block: Importer,
    repository: Repository,
    reservations: Reservations,
    cache_dir: Path,
    progress: Callable[[str], None],
) -> SnapshotManifest:
    """The `base` template, built if there is none yet. `cache_dir` keeps the root file system for the next node."""
    try:
        return node.resolve_template(BASE_NAME)
    except TemplateNotFound:
        progress("template base: making its root file system")
    image = await build_base_rootfs(cache_dir, BASE_RESOURCES.disk_mib, progress)
    return await build_from_image(node, block, repository, reservations, image, BASE_NAME, BASE_RESOURCES, progress)


async def build_from_image(
    node: TemplateNode,
    block: Importer,
    repository: Repository,
    reservations: Reservations,
    image: Path,
    name: str,
    resources: Resources,
    progress: Callable[[str], None],
) -> SnapshotManifest:
    """Make a template of a raw ext4 image. Raises `ImageError`, `BlockError`, `VmmError`, `GuestUnresponsive`."""
    layer = new_layer_id()
    reservations.reserved_layers.add(layer)
    try:
        progress(f"template {name}: importing {image.name} as a layer")
        await block.import_raw(image, repository.layer_path(layer))
        size_bytes = (await asyncio.to_thread(image.stat)).st_size
        progress(f"template {name}: first boot")
        manifest = await node.build_template(name, DiskStack(size_bytes, (layer,)), resources)
        progress(f"template {name}: ready ({manifest.snapshot_id})")
        return manifest
    finally:
        reservations.reserved_layers.discard(layer)
