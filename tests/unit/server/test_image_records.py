"""The list of converted images, and that their layers stay exactly as long as something needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node, content_ids

from agentenv.model import ImageInfo
from agentenv.server.image_records import ImageRecords
from agentenv.snapshots import ConvertedLayers, MemoryStore, Store

CHAIN = ("a" * 64, "b" * 64, "c" * 64)


class World:
    """A repository with images whose layers are made of what they are called."""

    def __init__(self, store: Store, node: Node) -> None:
        self.store = store
        self.node = node
        self.converted = ConvertedLayers(store, node.repository)
        self.records = ImageRecords(store, self.converted)

    async def convert(self, *chain: str) -> tuple[str, ...]:
        """The layers of these chain keys, as a conversion gets them: looked up, else made."""
        ids: list[str] = []
        for key in chain:
            found = await self.converted.get(key)
            if found is None:
                layer = self.node.layer(key.encode())
                found = await self.converted.put(key, layer, ids[-1] if ids else None)
            ids.append(found.blob.digest)
        return tuple(ids)

    async def swept(self) -> set[str]:
        """What a sweep leaves."""
        await self.node.repository.sweep(0.0)
        return await content_ids(self.store)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    store = MemoryStore()
    node = Node("node-a", store, tmp_path)
    await node.repository.load()
    return World(store, node)


def image(number: int, layers: tuple[str, ...], reference: str = "r", disk_mib: int = 64) -> ImageInfo:
    return ImageInfo((reference,), f"sha256:{number:064x}", layers, 10, disk_mib, 1.0)


async def test_an_image_keeps_its_layers_until_it_is_forgotten(world: World) -> None:
    layers = await world.convert(*CHAIN[:2])
    await world.records.remember(image(1, layers))
    assert await world.swept() == set(layers)
    assert await world.records.forget(image(1, layers).digest) == 1
    assert await world.records.all() == []
    # Not only after the hour for which a conversion holds what it got.
    assert await world.swept() == set()
    assert await world.records.forget(image(1, layers).digest) == 0


async def test_a_layer_of_another_image_stays(world: World) -> None:
    one, other = await world.convert(*CHAIN[:2]), await world.convert(CHAIN[0], CHAIN[2])
    await world.records.remember(image(1, one))
    await world.records.remember(image(2, other))
    await world.records.forget(image(1, one).digest)
    assert await world.swept() == set(other)


async def test_a_layer_that_a_conversion_looked_up_stays_for_it(world: World) -> None:
    layers = await world.convert(CHAIN[0])
    await world.records.remember(image(1, layers))
    assert await world.convert(CHAIN[0]) == layers
    await world.records.forget(image(1, layers).digest)
    assert await world.swept() == set(layers)


async def test_an_image_is_one_per_disk_size_with_all_of_its_names(world: World) -> None:
    layers = await world.convert(CHAIN[0])
    await world.records.remember(image(1, layers, "old"))
    await world.records.remember(image(1, layers, "new"))
    await world.records.remember(image(1, layers, "new", disk_mib=128))
    assert sorted((found.disk_mib, found.references) for found in await world.records.all()) == [
        (64, ("new", "old")),
        (128, ("new",)),
    ]
    assert await world.records.forget(image(1, layers).digest) == 2
