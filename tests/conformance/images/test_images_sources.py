"""The contract of `Source`, over a real registry, a layout directory and both kinds of archive."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.oci import BuiltImage, build_image, digest_of

from agentenv.errors import ImageError, ImageNotFound, Unsupported
from agentenv.images.source import Image, Source
from conftest import Place

LAYERS = [{"etc/": b"", "etc/a": b"one\n"}, {"etc/b": b"two\n" * 100_000}, {"etc/a": b"three\n"}]
CONFIG = {
    "Env": ["PATH=/bin", "X=a=b"],
    "Cmd": ["sh"],
    "User": "1000:5",
    "ExposedPorts": {"80/tcp": {}},
    "Labels": None,
}


@pytest.fixture
def image() -> BuiltImage:
    return build_image(LAYERS, ["gzip", "zstd", "none"], config=CONFIG)


async def fetch_all(source: Source, found: Image, folder: Path) -> tuple[list[Path], int]:
    """All layers at once, and the bytes that were counted."""
    counted = [0]

    def count(delta: int) -> None:
        counted[0] += delta

    wanted = [source.fetch_layer(layer, folder / str(at), count) for at, layer in enumerate(found.layers)]
    paths = await asyncio.gather(*wanted)
    # Counts from a worker thread arrive on the loop.
    await asyncio.sleep(0)
    return list(paths), counted[0]


def unpacked(path: Path) -> bytes:
    """Whatever its compression is."""
    content = path.read_bytes()
    for magic, command in ((b"\x1f\x8b", ["gzip", "-dc"]), (b"\x28\xb5\x2f\xfd", ["zstd", "-qdc"])):
        if content.startswith(magic):
            return subprocess.run(command, input=content, capture_output=True, check=True, timeout=60).stdout
    return content


async def test_an_image_is_described_before_anything_large_is_read(place: Place, image: BuiltImage) -> None:
    source = place.source(image)
    found = await source.image()
    assert [layer.diff_id for layer in found.layers] == image.diff_ids
    assert found.config.environment() == {"PATH": "/bin", "X": "a=b"}
    assert (found.config.cmd, found.config.user, found.config.exposed_ports) == (("sh",), "1000:5", ("80/tcp",))
    assert found.config.raw == image.config
    expected = digest_of(image.config) if place.kind == "docker-archive" else image.digest
    assert found.digest == found.named_digest == expected
    assert await source.image() is found
    await source.aclose()


async def test_every_layer_comes_as_a_file_of_the_right_content(place: Place, image: BuiltImage) -> None:
    source = place.source(image)
    found = await source.image()
    paths, counted = await fetch_all(source, found, place.folder)
    assert [unpacked(path) for path in paths] == list(image.layers)
    assert counted == sum(layer.size_bytes for layer in found.layers) == sum(path.stat().st_size for path in paths)
    await source.aclose()


async def test_fetching_again_gives_the_same(place: Place, image: BuiltImage) -> None:
    source = place.source(image)
    layer = (await source.image()).layers[1]
    first = await source.fetch_layer(layer, place.folder / "x", lambda _: None)
    again = await source.fetch_layer(layer, place.folder / "x", lambda _: None)
    assert unpacked(first) == unpacked(again) == image.layers[1]
    await source.aclose()


async def test_layers_that_are_equal_are_two(place: Place) -> None:
    built = build_image([LAYERS[0], LAYERS[1], LAYERS[0]])
    source = place.source(built, "equal")
    found = await source.image()
    paths, _ = await fetch_all(source, found, place.folder)
    assert [unpacked(path) for path in paths] == list(built.layers)
    await source.aclose()


async def test_an_image_without_layers_is_one(place: Place) -> None:
    source = place.source(build_image([]), "empty")
    assert (await source.image()).layers == ()
    await source.aclose()


async def test_a_name_that_is_not_there_is_not_found(place: Place, image: BuiltImage) -> None:
    reference = place.reference(image)
    source = place.named(reference.removesuffix(":t") + ":nobody")
    with pytest.raises(ImageNotFound, match="nobody"):
        await source.image()
    await source.aclose()


async def test_a_place_that_is_not_there_is_not_found_or_unreachable(place: Place) -> None:
    if place.kind.startswith("registry"):
        source = place.named(place.reference(build_image([]), "x").replace("some/x", "some/nobody"))
    else:
        source = place.named(f"{place.kind}:{place.folder}/nobody")
    with pytest.raises(ImageNotFound):
        await source.image()
    await source.aclose()


async def test_an_image_of_another_platform_is_refused(place: Place) -> None:
    source = place.source(build_image(LAYERS, architecture="arm64"), "arm")
    with pytest.raises(Unsupported, match="linux/arm64, not for linux/amd64"):
        await source.image()
    await source.aclose()


async def test_a_configuration_with_too_few_layers_is_refused(place: Place) -> None:
    whole, other = build_image(LAYERS), build_image(LAYERS[:1])
    body = whole.manifest.replace(digest_of(whole.config).encode(), digest_of(other.config).encode())
    body = body.replace(f'"size": {len(whole.config)}'.encode(), f'"size": {len(other.config)}'.encode(), 1)
    broken = BuiltImage(other.config, whole.layers, whole.packed, body)
    source = place.source(broken, "broken")
    with pytest.raises(ImageError, match=r"3 layers in .*, 1 in the configuration"):
        await source.image()
    await source.aclose()


@pytest.mark.parametrize("place", ["oci", "oci-archive", "docker-archive"], indirect=True)
async def test_what_is_no_regular_file_is_refused(place: Place) -> None:
    """A pipe would be waited for without end."""
    path = place.folder / "strange"
    path.mkdir()
    os.mkfifo(path / "index.json")
    os.mkfifo(place.folder / "pipe")
    source = place.named(f"{place.kind}:{path if place.kind == 'oci' else place.folder / 'pipe'}")
    with pytest.raises(ImageError, match="regular"):
        await source.image()
    await source.aclose()


async def test_a_cancelled_fetch_can_be_done_again(place: Place, image: BuiltImage) -> None:
    source = place.source(image)
    layer = (await source.image()).layers[0]
    task = asyncio.ensure_future(source.fetch_layer(layer, place.folder / "c", lambda _: None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    path = await source.fetch_layer(layer, place.folder / "c", lambda _: None)
    assert unpacked(path) == image.layers[0]
    await source.aclose()
