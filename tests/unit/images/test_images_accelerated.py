"""Which images are used as overlaybd layers, and that an error is never "no"."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_registry import FakeRegistry, always, digest_of
from tests.support.oci import BuiltImage, build_image, index_of

from agentenv.clock import FakeClock
from agentenv.errors import RegistryError, Unsupported
from agentenv.images import media
from agentenv.images.accelerated import ARTIFACT_TYPES, AcceleratedOptions, find_accelerated
from agentenv.images.convert import Converter
from agentenv.images.endpoints import RegistrySettings
from agentenv.images.fake import FakeConvertedLayers, FakeLayerMaker
from agentenv.images.reference import RegistryReference
from agentenv.images.registry import RegistryClient
from agentenv.images.registry_source import RegistrySource

REF = RegistryReference("reg.test", "a/b", "12")
PLAIN = build_image([{"a": b"1"}], config={"Env": ["A=1"]})
NOTE = "containerd.io/snapshot/overlaybd/"


class World:
    def __init__(self) -> None:
        self.registry = FakeRegistry()
        for number in range(2):
            self.registry.add_blob(overlaybd_layer(number))
        self.clock = FakeClock()
        transport = self.registry.transport()
        self.client = RegistryClient(RegistrySettings(), clock=self.clock, sleep=self._sleep, transport=transport)

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def push(self, image: BuiltImage, tag: str | None = None) -> str:
        for content in image.blobs().values():
            self.registry.add_blob(content)
        return self.registry.add_manifest(image.manifest, image.manifest_type, tag)

    def push_overlaybd(self, tag: str | None = None, notes: list[dict[str, Any]] | None = None, **more: Any) -> str:
        return self.registry.add_manifest(overlaybd_manifest(notes, **more), tag=tag)

    def push_overlaybd_image(self) -> str:
        """As the convertor pushes it under a tag of its own: diff ids are the layers' digests."""
        config = json.loads(PLAIN.config)
        config["rootfs"]["diff_ids"] = [digest_of(overlaybd_layer(number)) for number in range(2)]
        raw = json.dumps(config).encode()
        self.registry.add_blob(raw)
        described = {"mediaType": media.OCI_CONFIG, "digest": digest_of(raw), "size": len(raw)}
        return self.push_overlaybd("12", config=described)

    def refer(self, subject: str, digest: str, kind: str = ARTIFACT_TYPES[0]) -> None:
        """By the fallback tag."""
        entry = {"mediaType": media.OCI_MANIFEST, "digest": digest, "size": 1, "artifactType": kind}
        index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [entry]}
        self.registry.add_manifest(index, media.OCI_INDEX, subject.replace(":", "-"))

    def source(self) -> RegistrySource:
        return RegistrySource(self.client, REF)


def overlaybd_layer(number: int) -> bytes:
    """The header of a plain LSMT file of 64 GiB, which is all of it that is read here."""
    return struct.pack("<8s40xQ", b"LSMT\0\1\2\0", 64 << 30).ljust(1000 + number, b"\0")


def zfile_layer() -> bytes:
    """As far as it is read here: a ZFile with checksums whose first block did not shrink."""
    return b"ZFile\0\1".ljust(88, b"\0") + b"\1".ljust(512 - 88, b"\0") + overlaybd_layer(0)


def overlaybd_manifest(notes: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    layers = []
    for number, added in enumerate(notes if notes is not None else [{}, {}]):
        digest, size = digest_of(overlaybd_layer(number)), 1000 + number
        annotations = {NOTE + "blob-digest": digest, NOTE + "blob-size": str(size), **added}
        layers.append({"mediaType": media.OCI_LAYER, "digest": digest, "size": size, "annotations": annotations})
    config = {"mediaType": media.OCI_CONFIG, "digest": digest_of(PLAIN.config), "size": len(PLAIN.config)}
    return {"schemaVersion": 2, "mediaType": media.OCI_MANIFEST, "config": config, "layers": layers, **more}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.client.aclose()


async def test_an_ordinary_image_has_none(world: World) -> None:
    world.push(PLAIN, "12")
    assert await find_accelerated(world.source()) is None


@pytest.mark.parametrize("kind", ARTIFACT_TYPES)
async def test_a_referrer_is_used_with_the_image_s_own_configuration(world: World, kind: str) -> None:
    subject = world.push(PLAIN, "12")
    artifact = world.push_overlaybd()
    world.refer(subject, artifact, kind)
    found = await find_accelerated(world.source())
    assert found is not None
    assert (found.manifest_digest, found.layers_digest) == (subject, artifact)
    assert found.config.env == ("A=1",)
    assert [(blob.layer_id, blob.size_bytes) for blob in found.blobs] == [
        (digest_of(overlaybd_layer(0)).removeprefix("sha256:"), 1000),
        (digest_of(overlaybd_layer(1)).removeprefix("sha256:"), 1001),
    ]
    assert found.blobs[0].descriptor() == {
        "aenv_blob": 1,
        "digest": digest_of(overlaybd_layer(0)).removeprefix("sha256:"),
        "size_bytes": 1000,
        "source": {
            "kind": "registry",
            "registry": "reg.test",
            "repository": "a/b",
            "digest": digest_of(overlaybd_layer(0)).removeprefix("sha256:"),
        },
        "block_bytes": 65536,
        "blocks": None,
        "blocks_digest": None,
        "encryption": None,
    }


async def test_a_layer_without_checksums_is_told_from_one_with_them(world: World) -> None:
    checked = zfile_layer()
    world.registry.add_blob(checked)
    manifest = overlaybd_manifest()
    digest, size = digest_of(checked), str(len(checked))
    notes = {NOTE + "blob-digest": digest, NOTE + "blob-size": size}
    manifest["layers"].append(
        {"mediaType": media.OCI_LAYER, "digest": digest, "size": len(checked), "annotations": notes}
    )
    world.refer(world.push(PLAIN, "12"), world.registry.add_manifest(manifest))
    found = await find_accelerated(world.source())
    assert found is not None
    assert [blob.has_checksums for blob in found.blobs] == [False, False, True]
    assert not found.is_all_remote
    assert replace(found, blobs=found.blobs[2:]).is_all_remote


async def test_a_referrer_of_the_index_is_an_index_too(world: World) -> None:
    world.push(PLAIN)
    artifact = world.push_overlaybd()
    subject = world.registry.add_manifest(index_of({"amd64": PLAIN}), media.OCI_INDEX, "12")
    entry = {"mediaType": media.OCI_MANIFEST, "digest": artifact, "size": 1}
    both = [entry | {"platform": {"os": "linux", "architecture": name}} for name in ("arm64", "amd64")]
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": both}
    world.refer(subject, world.registry.add_manifest(index, media.OCI_INDEX))
    found = await find_accelerated(world.source())
    assert found is not None
    assert found.layers_digest == artifact


async def test_a_referrer_for_other_platforms_or_without_a_manifest_means_conversion(world: World) -> None:
    subject = world.push(PLAIN, "12")
    world.refer(subject, digest_of(b"nobody"))
    assert await find_accelerated(world.source()) is None
    entry = {"mediaType": media.OCI_MANIFEST, "digest": world.push_overlaybd(), "size": 1}
    other = entry | {"platform": {"os": "linux", "architecture": "arm64"}}
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [other]}
    world.refer(subject, world.registry.add_manifest(index, media.OCI_INDEX))
    assert await find_accelerated(world.source()) is None


async def test_other_referrers_are_passed_over(world: World) -> None:
    subject = world.push(PLAIN, "12")
    world.refer(subject, world.push_overlaybd(), "application/vnd.dev.cosign.simplesigning.v1+json")
    assert await find_accelerated(world.source()) is None


@pytest.mark.parametrize(
    "note",
    [
        {NOTE + "blob-digest": digest_of(b"packed once more")},
        {NOTE + "blob-size": "5"},
        {NOTE + "blob-fs-type": "erofs"},
        {NOTE + "turbo-oci/target-digest": digest_of(b"x")},
    ],
)
async def test_layers_that_cannot_be_read_as_they_are_mean_conversion(world: World, note: dict[str, str]) -> None:
    subject = world.push(PLAIN, "12")
    world.refer(subject, world.push_overlaybd(notes=[{}, note]))
    assert await find_accelerated(world.source()) is None


async def test_a_layer_that_only_records_a_trace_is_left_out(world: World) -> None:
    subject = world.push(PLAIN, "12")
    world.refer(subject, world.push_overlaybd(notes=[{}, {NOTE + "acceleration-layer": "yes"}]))
    found = await find_accelerated(world.source())
    assert found is not None
    assert len(found.blobs) == 1


async def test_a_suffixed_tag_is_used_only_when_it_is_asked_for(world: World) -> None:
    world.push(PLAIN, "12")
    artifact = world.push_overlaybd("12_obd")
    assert await find_accelerated(world.source()) is None
    found = await find_accelerated(world.source(), AcceleratedOptions(tag_suffix="_obd"))
    assert found is not None
    assert found.layers_digest == artifact
    assert await find_accelerated(world.source(), AcceleratedOptions(tag_suffix="-no")) is None


async def test_an_image_that_is_overlaybd_itself_is_used(world: World) -> None:
    pushed = world.push_overlaybd_image()
    found = await find_accelerated(world.source(), AcceleratedOptions(referrers=False))
    assert found is not None
    assert (found.manifest_digest, found.layers_digest) == (pushed, pushed)
    assert found.disk_bytes == 64 << 30


async def test_an_overlaybd_image_is_never_converted_as_files(world: World, tmp_path: Path) -> None:
    world.push_overlaybd_image()
    converter = Converter(FakeConvertedLayers(tmp_path / "r"), FakeLayerMaker(), tmp_path / "s")
    with pytest.raises(Unsupported, match="overlaybd"):
        await converter.convert(world.source(), 64, lambda _: None)


@pytest.mark.parametrize("part", ["referrers", "manifests/sha256-", "manifests/12_obd"])
@pytest.mark.parametrize("status", [500, 403, 429])
async def test_an_error_of_the_registry_is_an_error(world: World, part: str, status: int) -> None:
    world.push(PLAIN, "12")
    world.registry.faults.append(always(part, lambda _: httpx.Response(status)))
    with pytest.raises(RegistryError):
        await find_accelerated(world.source(), AcceleratedOptions(tag_suffix="_obd"))
