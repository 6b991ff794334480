"""Many conversions of images that share layers, with failures and cancels at random, beside a model of the results."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest

from agentenv.errors import ImageError
from agentenv.images.chain import chain_keys
from agentenv.images.config import ImageConfig
from agentenv.images.convert import ConvertedImage, ConvertedLayer, Converter
from agentenv.images.media import Compression
from agentenv.images.program import LayerTask, OnProgress
from agentenv.images.source import Image, ImageLayer, OnBytes

DISK_MIB = 64
CONVERSIONS = 12
LAYERS = [f"sha256:{number:064x}" for number in range(4)]


def diff_ids(rng: random.Random) -> list[str]:
    """Few layers and short chains, so that most are shared."""
    return [rng.choice(LAYERS[:2]) if at < 2 else rng.choice(LAYERS) for at in range(rng.randint(1, 6))]


class World:
    """Source, maker and repository in memory. Everything waits at random and may fail; nothing else is random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.records: dict[str, ConvertedLayer] = {}
        self.contents: dict[str, tuple[str, ...]] = {}
        self.made: dict[Path, tuple[str, ...]] = {}
        self.busy: set[str] = set()
        self.failures_per_cent = 4

    async def moment(self) -> None:
        for _ in range(self.rng.randint(0, 4)):
            await asyncio.sleep(0)
        if self.rng.randrange(100) < self.failures_per_cent:
            raise ImageError("it went wrong")

    # ConvertedLayers: a layer's id is a hash of all that is below it.
    async def get(self, chain_key: str) -> ConvertedLayer | None:
        await self.moment()
        return self.records.get(chain_key)

    async def put(self, chain_key: str, layer: Path, parent_id: str | None) -> ConvertedLayer:
        await self.moment()
        content = self.made[layer]
        layer_id = hashlib.sha256(repr(content).encode()).hexdigest()
        self.contents[layer_id] = content
        self.records[chain_key] = ConvertedLayer(layer_id, parent_id)
        return self.records[chain_key]

    async def local_file(self, layer_id: str, folder: Path) -> Path:
        await self.moment()
        self.made[Path(layer_id)] = self.contents[layer_id]
        return Path(layer_id)

    async def apply(self, task: LayerTask, on_progress: OnProgress) -> None:
        below = self.made[task.parents[-1]] if task.parents else ()
        assert [self.made[parent] for parent in task.parents] == [below[: at + 1] for at in range(len(below))]
        assert task.uuid not in self.busy, "two conversions of one layer at a time"
        self.busy.add(task.uuid)
        try:
            await self.moment()
        finally:
            self.busy.discard(task.uuid)
        assert self.made[task.tar] == (task.diff_id,)
        self.made[task.out] = (*below, task.diff_id)


class Source:
    def __init__(self, world: World, wanted: list[str]) -> None:
        self.world = world
        layers = tuple(ImageLayer(diff_id, None, 10, Compression.NONE, diff_id) for diff_id in wanted)
        self.found = Image("x", "d", "d", ImageConfig("linux", "amd64"), layers)

    async def image(self) -> Image:
        await self.world.moment()
        return self.found

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        await self.world.moment()
        self.world.made[into] = (layer.diff_id,)
        return into

    async def aclose(self) -> None:
        return


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_fails_or_is_cancelled_the_others_come_out_right(seed: int, tmp_path: Path) -> None:
    world = World(seed)
    converter = Converter(world, world, tmp_path / "staging")

    async def convert(wanted: list[str]) -> ConvertedImage:
        return await converter.convert(Source(world, wanted), DISK_MIB, lambda _: None)

    async def cancel_sometimes(task: asyncio.Task[ConvertedImage]) -> None:
        if world.rng.randrange(4) == 0:
            for _ in range(world.rng.randint(0, 60)):
                await asyncio.sleep(0)
            task.cancel()
            # A person who presses ^C twice.
            for _ in range(world.rng.choice([0, 0, 1, 2])):
                await asyncio.sleep(0)
                task.cancel()

    wanted = [diff_ids(world.rng) for _ in range(CONVERSIONS)]
    async with asyncio.timeout(60):
        tasks = [asyncio.ensure_future(convert(one)) for one in wanted]
        await asyncio.gather(*(cancel_sometimes(task) for task in tasks))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # Nobody is in the way of those that come later.
        world.failures_per_cent = 0
        results += await asyncio.gather(*(convert(one) for one in wanted))
    for one, result in zip([*wanted, *wanted], results, strict=True):
        if isinstance(result, ConvertedImage):
            assert [world.contents[layer] for layer in result.disk.layers] == [
                tuple(one[: at + 1]) for at in range(len(one))
            ]
        else:
            assert isinstance(result, ImageError | asyncio.CancelledError), repr(result)
    assert list((tmp_path / "staging").iterdir()) == []
    assert set(world.records) == {key for one in wanted for key in chain_keys(DISK_MIB << 20, one)}
    assert world.busy == set()
