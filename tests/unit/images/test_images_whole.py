"""Layers that cannot be verified by their blocks: fetched whole, once, verified, and kept."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fake_registry import FakeRegistry, always, digest_of

from agentenv.clock import FakeClock
from agentenv.errors import BlockError, ImageError, RegistryError
from agentenv.images.accelerated import RegistryBlob
from agentenv.images.endpoints import RegistrySettings
from agentenv.images.fake import FakeConvertedLayers
from agentenv.images.reference import RegistryReference
from agentenv.images.registry import RegistryClient
from agentenv.images.registry_source import RegistrySource
from agentenv.images.whole import WholeLayers
from agentenv.model import Progress

CONTENT = b"a layer" * 100_000
BLOB = RegistryBlob("reg.test", "a/b", digest_of(CONTENT), len(CONTENT), has_checksums=False)


@dataclass
class World:
    """A registry with one such layer, and where it is kept. `refusal` is what blockd says of what was fetched."""

    root: Path
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    clock: FakeClock = field(default_factory=FakeClock)
    refusal: BlockError | None = None
    said: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry.add_blob(CONTENT)
        self.kept = FakeConvertedLayers(self.root / "kept")
        self.whole = WholeLayers(self.kept, self._compact, self.root / "staging")
        transport = self.registry.transport()
        self.client = RegistryClient(RegistrySettings(), clock=self.clock, sleep=self._sleep, transport=transport)
        self.source = RegistrySource(self.client, RegistryReference("reg.test", "a/b", "12"))

    async def layer_id(self) -> str:
        return await self.whole.layer_id(self.source, BLOB, self.said.append)

    def downloads(self) -> int:
        return sum("/blobs/" in path for path in self.registry.paths())

    def files(self) -> list[Path]:
        return list((self.root / "staging").rglob("*"))

    async def _compact(self, layer: Path, into: Path) -> None:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        shutil.copy(layer, into)

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    assert made.files() == []
    await made.client.aclose()


async def test_it_is_fetched_once_however_many_ask(world: World) -> None:
    ids = await asyncio.gather(*(world.layer_id() for _ in range(3)))
    assert set(ids) == {await world.layer_id()}
    assert world.downloads() == 1
    assert (world.kept.folder / ids[0]).read_bytes() == CONTENT
    assert (world.said[-1].done_bytes, world.said[-1].total_bytes) == (len(CONTENT), len(CONTENT))


async def test_what_is_not_what_its_digest_says_is_not_kept(world: World) -> None:
    world.registry.blobs[BLOB.digest] = CONTENT[:-1] + b"X"
    with pytest.raises(RegistryError, match=BLOB.digest[:19]):
        await world.layer_id()
    assert world.kept.records == {}


async def test_what_is_no_layer_is_refused_by_name(world: World) -> None:
    world.refusal = BlockError("no layer", "corrupt")
    with pytest.raises(ImageError, match=f"reg.test/a/b:12: layer {BLOB.digest}"):
        await world.layer_id()
    world.refusal = BlockError("it hangs", "unreachable")
    with pytest.raises(BlockError, match="hangs"):
        await world.layer_id()
    assert world.kept.records == {}


async def test_who_waited_for_one_that_failed_fetches_it(world: World) -> None:
    world.refusal = BlockError("it hangs", "unreachable")
    first = asyncio.create_task(world.layer_id())
    await asyncio.sleep(0)
    second = asyncio.create_task(world.layer_id())
    with pytest.raises(BlockError):
        await first
    world.refusal = None
    assert (world.kept.folder / await second).read_bytes() == CONTENT


async def test_a_cancel_leaves_nothing(world: World) -> None:
    arrived = asyncio.Event()

    def fault(_: httpx.Request) -> httpx.Response:
        arrived.set()
        return httpx.Response(200, stream=Never())

    world.registry.faults.append(always("/blobs/", fault))
    task = asyncio.create_task(world.layer_id())
    await arrived.wait()
    assert world.files() != []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Never(httpx.AsyncByteStream):
    """A body that does not come."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""
