"""From a real registry to a disk and back to an image, with the real `aenv-image`."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.host import built
from tests.support.oci import BuiltImage, build_image
from tests.support.registry import Registry

from agentenv.errors import ImageError, InvalidRequest
from agentenv.images.convert import ConvertedImage, Converter
from agentenv.images.endpoints import RegistrySettings
from agentenv.images.export import ExportJob, export_layout
from agentenv.images.fake import FakeConvertedLayers
from agentenv.images.layout import LayoutSource
from agentenv.images.places import open_source
from agentenv.images.program import ImageProgram
from agentenv.images.reference import LocalReference, Transport, parse_reference
from agentenv.images.registry import RegistryClient

DISK_MIB = 64
LAYERS = [
    {"etc/": b"", "etc/kept": b"1\n", "etc/changed": b"old\n", "etc/gone": b"x", "dir/": b"", "dir/old": b"y"},
    {"etc/changed": b"new\n" * 9000, "etc/.wh.gone": b"", "dir/": b"", "dir/.wh..wh..opq": b"", "dir/new": b"z"},
    {"big": bytes(range(256)) * 8192},
]
EXPECTED = {
    "etc/kept": b"1\n",
    "etc/changed": b"new\n" * 9000,
    "dir/new": b"z",
    "big": bytes(range(256)) * 8192,
}


class Bench:
    def __init__(self, folder: Path, registry: Registry, client: RegistryClient) -> None:
        self.folder = folder
        self.layers = FakeConvertedLayers(folder / "repository")
        self.program = ImageProgram(built("aenv-image") / "aenv-image")
        self.converter = Converter(self.layers, self.program, folder / "staging")
        self._registry = registry
        self._client = client

    async def convert(self, image: BuiltImage, disk_mib: int = DISK_MIB) -> ConvertedImage:
        self._registry.push(image, "real", image.digest[-12:])
        reference = parse_reference(f"{self._registry.host}/real:{image.digest[-12:]}")
        return await self.converter.convert(open_source(reference, self._client), disk_mib, lambda _: None)

    async def exported(self, made: ConvertedImage, name: str) -> dict[str, bytes]:
        """The files of the disk, by way of an exported image."""
        paths = tuple(self.layers.folder / layer for layer in made.disk.layers)
        job = ExportJob(paths, made.disk.size_bytes, made.config, "none", "t")
        await export_layout(self.program, job, self.folder / name, lambda _: None)
        source = LayoutSource(LocalReference(Transport.OCI, str(self.folder / name), "t"))
        image = await source.image()
        assert image.config.env == made.config.env
        return files_of((await source.fetch_layer(image.layers[0], self.folder, lambda _: None)).read_bytes())


def files_of(tar: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        found = {}
        for member in archive:
            if member.isreg() and (file := archive.extractfile(member)) is not None:
                found[os.path.normpath(member.name)] = file.read()
        return found


@pytest.fixture
async def bench(tmp_path: Path, registry: Registry) -> AsyncIterator[Bench]:
    client = RegistryClient(RegistrySettings())
    yield Bench(tmp_path, registry, client)
    await client.aclose()
    assert not list((tmp_path / "staging").glob("*")), "a conversion left files"


async def test_layers_are_applied_and_come_back_as_an_image(bench: Bench) -> None:
    image = build_image(LAYERS, ["gzip", "zstd", "none"], config={"Env": ["A=1"]})
    made = await bench.convert(image)
    assert (len(made.disk.layers), made.converted) == (3, 3)
    assert await bench.exported(made, "out") == EXPECTED


async def test_equal_images_give_equal_layers(bench: Bench, tmp_path: Path) -> None:
    image = build_image(LAYERS)
    first = await bench.convert(image)
    bench.layers.records.clear()
    again = await bench.convert(image)
    assert again.converted == 3
    assert again.disk == first.disk


async def test_an_image_of_nothing_is_an_empty_file_system(bench: Bench) -> None:
    made = await bench.convert(build_image([]))
    assert await bench.exported(made, "out") == {}


async def test_a_disk_too_small_is_the_caller_s_mistake(bench: Bench) -> None:
    image = build_image([{"big": os.urandom(40 << 20)}], ["none"])
    with pytest.raises(InvalidRequest, match="would do"):
        await bench.convert(image, 32)


async def test_a_layer_with_other_content_is_refused(bench: Bench) -> None:
    whole, other = build_image(LAYERS[:1]), build_image(LAYERS[2:])
    body = whole.manifest.replace(whole.config_digest().encode(), other.config_digest().encode())
    wrong = BuiltImage(other.config, whole.layers, whole.packed, body)
    with pytest.raises(ImageError, match="digest"):
        await bench.convert(wrong)
    assert bench.layers.records == {}


async def test_a_cancel_ends_the_program_and_leaves_nothing(bench: Bench) -> None:
    image = build_image([{"big": os.urandom(30 << 20)}], ["gzip"])
    task = asyncio.ensure_future(bench.convert(image, 256))
    async with asyncio.timeout(60):
        while not list((bench.folder / "staging").glob("*/*")) and not task.done():
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() or task.exception() is None
