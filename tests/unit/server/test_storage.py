"""The three tiers as one node shows and collects them, over a node of fakes and a repository in a directory."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.node.conftest import World

from agentenv.config import load
from agentenv.errors import StoreUnavailable
from agentenv.model import ImageInfo, TierUnavailable, TierUsage
from agentenv.server.image_records import UNCLAIMED_S, ImageRecords
from agentenv.server.storage import Storage
from agentenv.snapshots import CommittedRepository, ConvertedLayers, LinkPublisher, PosixStore, Process, new_local_id
from agentenv.snapshots.stores.interface import Entry

FAILED, FINISHED = "a" * 64, "b" * 64


class StorageWorld(World):
    """A node with converted layers. `serve` begins a new server, which holds nothing of the former one's."""

    async def serve(self) -> None:
        await self.start()
        self.converted = ConvertedLayers(self.store, self.repository)
        self.records = ImageRecords(self.store, self.converted)
        config = load(None, {"AENV_SERVER_STATE_DIR": str(self.root)})
        self.storage = Storage(config, self.host, self.node, self.records)

    async def restart(self) -> None:
        await self.stop()
        await self.serve()

    async def convert(self, chain_key: str) -> str:
        """A layer of a conversion that has not ended; its digest."""
        path = self.staging.layer(new_local_id())
        path.write_bytes(chain_key.encode())
        return (await self.converted.put(chain_key, path, None)).blob.digest

    def age(self, seconds: float) -> None:
        """Make all objects of images that much older than now."""
        for path in (self.store.root / "images").iterdir():
            os.utime(path, (time.time() - seconds,) * 2)

    def layers(self) -> set[str]:
        return {path.stem for path in (self.store.root / "layers").iterdir()}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[StorageWorld]:
    (tmp_path / "sandboxes").mkdir()
    made = StorageWorld(tmp_path)
    await made.serve()
    yield made
    await made.stop()


async def test_a_collection_takes_the_layers_of_a_conversion_that_failed_long_ago(world: StorageWorld) -> None:
    failed, finished = await world.convert(FAILED), await world.convert(FINISHED)
    await world.records.remember(ImageInfo(("r",), f"sha256:{1:064x}", (finished,), 10, 64, 1.0))
    world.age(UNCLAIMED_S + 60)
    await world.restart()
    report = await world.storage.collect(0.0)
    assert report.forgotten_layers == 1
    assert world.layers() == {finished}
    assert failed != finished
    assert list(await world.converted.all()) == [FINISHED]


async def test_a_collection_leaves_a_conversion_under_way_alone(world: StorageWorld) -> None:
    layer = await world.convert(FAILED)
    world.age(UNCLAIMED_S - 60)
    assert (await world.storage.collect(0.0)).forgotten_layers == 0
    assert world.layers() == {layer}


async def test_a_conversion_of_another_node_keeps_the_old_layer_that_it_found(
    world: StorageWorld, tmp_path: Path
) -> None:
    layer = await world.convert(FAILED)
    world.age(UNCLAIMED_S + 60)
    await world.restart()
    store = PosixStore(world.store.root)
    other = CommittedRepository(
        store, LinkPublisher(store, world.block), world.staging, tmp_path / "other", Process("n2")
    )
    await other.load()
    there = ConvertedLayers(store, other)
    found = await there.get(FAILED)
    assert found is not None
    await world.storage.collect(0.0)
    assert world.layers() == {layer}
    await ImageRecords(store, there).remember(ImageInfo(("r",), f"sha256:{1:064x}", (layer,), 10, 64, 1.0))
    await world.storage.collect(0.0)
    assert world.layers() == {layer}


async def test_the_tiers_of_this_node_are_shown_while_the_store_is_out(
    world: StorageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.template()
    whole = await world.storage.usage()
    assert isinstance(whole.repository, TierUsage)

    async def out(self: PosixStore, folder: str) -> list[Entry]:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(PosixStore, "list", out)
    shown = await world.storage.usage()
    assert shown.repository == TierUnavailable(whole.repository.location, "the store does not answer")
    assert (shown.staging.location, shown.cache) == (whole.staging.location, whole.cache)
    assert shown.snapshots == whole.snapshots == 1
    for ask in (world.storage.collect(None), world.storage.verify(print), world.storage.repair(print)):
        with pytest.raises(StoreUnavailable):
            await ask
