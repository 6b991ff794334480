"""Conversion: what is shared, what overlaps, what is left after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.oci import BuiltImage, build_image, digest_of, write_layout

from agentenv.errors import ImageError, InvalidRequest, StorageFull
from agentenv.images.chain import EMPTY_TAR, chain_keys
from agentenv.images.convert import AHEAD_MAX, ConvertedLayer, Converter
from agentenv.images.fake import FakeConvertedLayers, FakeLayerMaker
from agentenv.images.layout import LayoutSource
from agentenv.images.places import ScratchSource
from agentenv.images.program import LayerTask
from agentenv.images.reference import LocalReference, Transport
from agentenv.images.source import Image, ImageLayer, OnBytes
from agentenv.model import Progress

FILES = [{f"f{number}": bytes([number]) * 1000} for number in range(8)]
MIB = 64
CHAIN_KEY_OF_A = "94b5506b3d437bd89e1e96a8f686a1117538a5b13fd530d8e7a2ec71e2abf063"


class SlowSource:
    """A layout whose layers come when the test lets them, and always as copies."""

    def __init__(self, inner: LayoutSource) -> None:
        self.inner = inner
        self.fetched: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing: Exception | None = None
        self.was_asked = False

    async def image(self) -> Image:
        found = await self.inner.image()
        self.was_asked = True
        return found

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        self.fetched.append(layer.diff_id)
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        path = await self.inner.fetch_layer(layer, into, on_bytes)
        into.write_bytes(path.read_bytes())
        return into

    async def aclose(self) -> None:
        await self.inner.aclose()


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.staging = folder / "staging"
        self.layers = FakeConvertedLayers(folder / "repository")
        self.maker = FakeLayerMaker()
        self.said: list[Progress] = []

    def converter(self, maker: FakeLayerMaker | None = None) -> Converter:
        self.maker = maker or self.maker
        return Converter(self.layers, self.maker, self.staging)

    def source(self, image: BuiltImage) -> SlowSource:
        folder = self.folder / image.digest[-12:]
        if not folder.exists():
            write_layout(image, folder)
        return SlowSource(LayoutSource(LocalReference(Transport.OCI, str(folder))))

    def left(self) -> list[Path]:
        """What the staging folder holds."""
        return list(self.staging.iterdir()) if self.staging.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_each_layer_is_put_over_those_below(bench: Bench) -> None:
    image = build_image(FILES[:3])
    made = await bench.converter().convert(bench.source(image), MIB, bench.said.append)
    assert made.disk.size_bytes == MIB << 20
    assert len(set(made.disk.layers)) == 3
    assert (made.manifest_digest, made.converted) == (image.digest, 3)
    tasks = bench.maker.tasks
    assert [task.diff_id for task in tasks] == image.diff_ids
    assert [len(task.parents) for task in tasks] == [0, 1, 2]
    contents = [(bench.layers.folder / layer).read_text() for layer in made.disk.layers]
    assert contents[2].endswith(f"over [{made.disk.layers[0]} {made.disk.layers[1]}]")
    assert bench.left() == []


async def test_an_image_is_converted_once(bench: Bench) -> None:
    image, converter = build_image(FILES[:3]), bench.converter()
    first = await converter.convert(bench.source(image), MIB, bench.said.append)
    source = bench.source(image)
    again = await converter.convert(source, MIB, bench.said.append)
    assert again.disk == first.disk
    assert (again.converted, source.fetched, len(bench.maker.tasks)) == (0, [], 3)


async def test_layers_below_are_shared_and_another_size_shares_nothing(bench: Bench) -> None:
    converter = bench.converter()
    first = await converter.convert(bench.source(build_image(FILES[:2])), MIB, bench.said.append)
    other = await converter.convert(bench.source(build_image([*FILES[:2], FILES[5]])), MIB, bench.said.append)
    assert other.disk.layers[:2] == first.disk.layers
    assert other.converted == 1
    larger = await converter.convert(bench.source(build_image(FILES[:2])), MIB * 2, bench.said.append)
    assert not set(larger.disk.layers) & set(first.disk.layers)


async def test_the_same_layer_over_another_parent_is_another(bench: Bench) -> None:
    converter = bench.converter()
    one = await converter.convert(bench.source(build_image([FILES[0], FILES[2]])), MIB, bench.said.append)
    two = await converter.convert(bench.source(build_image([FILES[1], FILES[2]])), MIB, bench.said.append)
    assert one.disk.layers[1] != two.disk.layers[1]


async def test_empty_layers_are_left_out(bench: Bench) -> None:
    image = build_image([FILES[0], {}, FILES[1]])
    made = await bench.converter().convert(bench.source(image), MIB, bench.said.append)
    assert len(made.disk.layers) == 2


async def test_an_image_of_nothing_is_an_empty_file_system(bench: Bench) -> None:
    seen: list[bytes] = []

    async def look(task: LayerTask) -> None:
        seen.append(task.tar.read_bytes())

    converter = bench.converter(FakeLayerMaker(look))
    made = await converter.convert(bench.source(build_image([])), MIB, bench.said.append)
    assert len(made.disk.layers) == 1
    assert seen == [EMPTY_TAR]


async def test_scratch_is_an_image_of_nothing(bench: Bench) -> None:
    made = await bench.converter().convert(ScratchSource(), MIB, bench.said.append)
    assert (len(made.disk.layers), made.config.os, made.reference) == (1, "linux", "scratch")


async def test_ten_at_once_convert_once(bench: Bench) -> None:
    image, converter = build_image(FILES[:4]), bench.converter()
    sources = [bench.source(image) for _ in range(10)]
    made = await asyncio.gather(*(converter.convert(source, MIB, bench.said.append) for source in sources))
    assert len({one.disk for one in made}) == 1
    assert len(bench.maker.tasks) == 4
    assert sum(len(source.fetched) for source in sources) == 4
    assert bench.left() == []


async def test_the_next_layer_is_fetched_while_one_is_converted(bench: Bench) -> None:
    image = build_image(FILES)
    source = bench.source(image)
    fetched_then: list[int] = []

    async def look(task: LayerTask) -> None:
        if not task.parents:
            await until(lambda: len(source.fetched) >= AHEAD_MAX)
            fetched_then.append(len(source.fetched))

    await bench.converter(FakeLayerMaker(look)).convert(source, MIB, bench.said.append)
    # And no more of them than may wait on the disk.
    assert fetched_then == [AHEAD_MAX]


async def until(happened: Callable[[], bool]) -> None:
    """Let others run until it did, and whatever it set off."""
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_that_waited_goes_on_when_the_first_fails(bench: Bench) -> None:
    image, converter = build_image(FILES[:3]), bench.converter()
    failing, good = bench.source(image), bench.source(image)
    failing.gate.clear()
    first = asyncio.ensure_future(converter.convert(failing, MIB, bench.said.append))
    await until(lambda: len(failing.fetched) == 3)
    second = asyncio.ensure_future(converter.convert(good, MIB, bench.said.append))
    await until(lambda: good.was_asked)
    assert good.fetched == []
    failing.failing = ImageError("its registry went away")
    failing.gate.set()
    with pytest.raises(ImageError, match="went away"):
        await first
    assert (await second).converted == 3
    assert bench.left() == []


async def test_one_that_waited_goes_on_when_the_first_is_cancelled(bench: Bench) -> None:
    image, converter = build_image(FILES[:3]), bench.converter()
    stuck, good = bench.source(image), bench.source(image)
    stuck.gate.clear()
    first = asyncio.ensure_future(converter.convert(stuck, MIB, bench.said.append))
    await until(lambda: len(stuck.fetched) == 3)
    second = asyncio.ensure_future(converter.convert(good, MIB, bench.said.append))
    await until(lambda: good.was_asked)
    first.cancel()
    assert (await second).converted == 3
    with pytest.raises(asyncio.CancelledError):
        await first
    assert bench.left() == []


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_cancel_at_any_moment_leaves_nothing(bench: Bench, turns: int) -> None:
    image, converter = build_image(FILES[:3]), bench.converter()
    task = asyncio.ensure_future(converter.convert(bench.source(image), MIB, bench.said.append))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.left() == []
    made = await converter.convert(bench.source(image), MIB, bench.said.append)
    assert len(made.disk.layers) == 3


@pytest.mark.parametrize("error", [ImageError("broken"), StorageFull("convert needs 5 bytes"), OSError("?")])
async def test_a_failed_layer_keeps_those_below_and_leaves_no_files(bench: Bench, error: Exception) -> None:
    async def fail(task: LayerTask) -> None:
        if len(task.parents) == 2:
            raise error

    image = build_image(FILES[:3])
    with pytest.raises(type(error)):
        await bench.converter(FakeLayerMaker(fail)).convert(bench.source(image), MIB, bench.said.append)
    assert len(bench.layers.records) == 2
    assert bench.left() == []
    assert (await bench.converter(FakeLayerMaker()).convert(bench.source(image), MIB, bench.said.append)).converted == 1


async def test_a_layer_made_over_other_blocks_is_made_again(bench: Bench) -> None:
    """Another node converted the chain with other tools, and its lower layer was replaced."""
    image, converter = build_image(FILES[:2]), bench.converter()
    first = await converter.convert(bench.source(image), MIB, bench.said.append)
    keys = chain_keys(MIB << 20, image.diff_ids)
    bench.layers.records[keys[1]] = ConvertedLayer(first.disk.layers[1], "f" * 64)
    again = await converter.convert(bench.source(image), MIB, bench.said.append)
    assert again.converted == 1
    assert bench.layers.records[keys[1]].parent_id == first.disk.layers[0]


async def test_a_wrong_layer_is_never_recorded(bench: Bench) -> None:
    image = build_image(FILES[:1])
    other = build_image(FILES[1:2])
    body = image.manifest.replace(digest_of(image.config).encode(), digest_of(other.config).encode())
    assert len(image.config) == len(other.config)
    wrong = BuiltImage(other.config, image.layers, image.packed, body)
    with pytest.raises(ImageError, match="diff id"):
        await bench.converter().convert(bench.source(wrong), MIB, bench.said.append)
    assert bench.layers.records == {}


async def test_progress_goes_up_to_the_image_s_packed_bytes(bench: Bench) -> None:
    image = build_image(FILES[:3])
    await bench.converter().convert(bench.source(image), MIB, bench.said.append)
    counted = [said for said in bench.said if said.total_bytes is not None]
    packed = sum(len(content) for content, _ in image.packed)
    assert counted[-1].done_bytes == counted[-1].total_bytes == packed
    assert [said.done_bytes for said in counted] == sorted(said.done_bytes for said in counted)
    assert len({said.text for said in counted}) == 1


@pytest.mark.parametrize("disk_mib", [0, 15, (1 << 20) + 1])
async def test_sizes_out_of_range_are_refused_before_anything(bench: Bench, disk_mib: int) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        await bench.converter().convert(bench.source(build_image([])), disk_mib, bench.said.append)
    assert not bench.staging.exists()


def test_chain_keys_depend_on_all_below_and_on_the_size() -> None:
    a, b = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    assert chain_keys(1 << 30, [a, b])[0] == chain_keys(1 << 30, [a])[0]
    keys = {*chain_keys(1 << 30, [a, b]), *chain_keys(1 << 30, [b, a]), *chain_keys(1 << 31, [a, b])}
    assert len(keys) == 6
    # The keys of layers that are stored already: change CONVERSION_VERSION, never this.
    assert chain_keys(1 << 30, [a])[0] == CHAIN_KEY_OF_A
