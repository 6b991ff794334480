"""The builder with a fake node and fake layers: whose fault a failed build is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ImageError, InvalidRequest, SandboxNotFound
from agentenv.model import DiskStack, Resources, SnapshotManifest
from agentenv.templates.builder import BASE_RESOURCES, EXT4_MAGIC, EXT4_MAGIC_OFFSET, SECTOR_BYTES, Builder


class NodeWhoseMachinesEnd:
    def resolve_template(self, reference: str) -> SnapshotManifest:
        raise AssertionError("not asked for")

    def check_fits(self, resources: Resources) -> None:
        """Everything fits."""

    async def build_template(
        self, name: str, disk: DiskStack, resources: Resources, image_config: dict[str, Any] | None = None
    ) -> SnapshotManifest:
        raise SandboxNotFound("sandbox i0 was killed meanwhile")


class Store:
    """blockd's import and the node's local layers."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def local_path(self, layer_id: str) -> Path:
        return Path("/staging") / layer_id

    @contextmanager
    def reserved(self, *ids: str) -> Iterator[None]:
        self.held += ids
        yield
        for layer_id in ids:
            self.held.remove(layer_id)

    async def import_raw(self, source: Path, into: Path) -> object:
        assert self.held == [into.name]
        return None


def builder(tmp_path: Path) -> Builder:
    store = Store()
    return Builder(NodeWhoseMachinesEnd(), store, store, tmp_path, lambda _: None)


async def test_an_image_that_ends_its_machine_is_a_bad_request_that_names_it(tmp_path: Path) -> None:
    image = tmp_path / "broken.ext4"
    head = bytearray(4 * SECTOR_BYTES)
    head[EXT4_MAGIC_OFFSET : EXT4_MAGIC_OFFSET + 2] = EXT4_MAGIC
    image.write_bytes(head)
    with pytest.raises(InvalidRequest, match=r"broken\.ext4 does not boot"):
        await builder(tmp_path).build("broken", image, BASE_RESOURCES)


async def test_an_oci_image_that_ends_its_machine_is_an_error_of_the_image(tmp_path: Path) -> None:
    disk = DiskStack(SECTOR_BYTES, ("a" * 64,))
    with pytest.raises(ImageError, match="python:3 does not boot"):
        await builder(tmp_path).build_from_disk("x", disk, BASE_RESOURCES, {}, "python:3")
