"""The builder with a fake node and a fake store: whose fault a failed build is."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from agentenv.errors import InvalidRequest, SandboxNotFound
from agentenv.model import DiskStack, Resources, SnapshotManifest
from agentenv.snapshots import Repository
from agentenv.templates.builder import BASE_RESOURCES, EXT4_MAGIC, EXT4_MAGIC_OFFSET, SECTOR_BYTES, Builder


class NodeWhoseMachinesEnd:
    def resolve_template(self, reference: str) -> SnapshotManifest:
        raise AssertionError("not asked for")

    def check_fits(self, resources: Resources) -> None:
        """Everything fits."""

    async def build_template(self, name: str, disk: DiskStack, resources: Resources) -> SnapshotManifest:
        raise SandboxNotFound("sandbox i0 was killed meanwhile")


class Store:
    """blockd's import and the repository's paths."""

    def layer_path(self, layer: str) -> Path:
        return Path("/repository") / layer

    async def import_raw(self, source: Path, into: Path) -> object:
        return None


class Reserved:
    def __init__(self) -> None:
        self.held: list[str] = []

    def reserve(self, *layer_ids: str) -> None:
        self.held += layer_ids

    def release(self, *layer_ids: str) -> None:
        for layer_id in layer_ids:
            self.held.remove(layer_id)


async def test_an_image_that_ends_its_machine_is_a_bad_request_that_names_it(tmp_path: Path) -> None:
    image = tmp_path / "broken.ext4"
    head = bytearray(4 * SECTOR_BYTES)
    head[EXT4_MAGIC_OFFSET : EXT4_MAGIC_OFFSET + 2] = EXT4_MAGIC
    image.write_bytes(head)
    reserved, store = Reserved(), Store()
    node = NodeWhoseMachinesEnd()
    builder = Builder(node, store, cast(Repository, store), reserved, tmp_path, lambda _: None)
    with pytest.raises(InvalidRequest, match=r"broken\.ext4 does not boot"):
        await builder.build("broken", image, BASE_RESOURCES)
    assert reserved.held == []
