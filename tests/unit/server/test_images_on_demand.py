"""An image that a registry holds as overlaybd layers: what is read from there, and what of it is kept here."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.unit.node.conftest import World

from agentenv.images import (
    Converter,
    FakeLayerMaker,
    ImageProgram,
    RegistryClient,
    RegistrySettings,
    RepositoryLayers,
    WholeLayers,
    media,
)
from agentenv.model import ImageReference
from agentenv.server.image_records import ImageRecords
from agentenv.server.images import Images
from agentenv.server.stores import StoresFile
from agentenv.snapshots import ConvertedLayers
from agentenv.templates.builder import Builder

NOTE = "containerd.io/snapshot/overlaybd/"
LSMT = struct.pack("<8s40xQ", b"LSMT\0\1\2\0", 64 << 30).ljust(4096, b"\0")
CHECKED = b"ZFile\0\1".ljust(88, b"\0") + b"\1".ljust(512 - 88, b"\0") + LSMT
UNCHECKED = CHECKED[:88] + b"\0" + CHECKED[89:]
REFERENCE = ImageReference("reg.test/a/b:12")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Place(World):
    """A node that pulls from a registry of dictionaries."""

    def prepare(self) -> None:
        self.served: dict[str, tuple[str, bytes]] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.converted = ConvertedLayers(self.store, self.repository)
        self.records = ImageRecords(self.store, self.converted)
        local = RepositoryLayers(self.converted, self.repository.path, self._copy)
        client = RegistryClient(RegistrySettings(), transport=httpx.MockTransport(self._answer))
        staging = self.root / "staging" / "images"
        self.images = Images(
            self.node,
            self.host.layers,
            cast(Builder, SimpleNamespace()),
            self.records,
            local,
            Converter(local, FakeLayerMaker(), staging),
            WholeLayers(local, self._copy, staging),
            ImageProgram(Path("/nothing")),
            client,
            StoresFile(self.root / "stores.json", None, None),
            staging,
            self.clock,
        )

    def push(self, *layers: bytes) -> None:
        config = {"architecture": "amd64", "os": "linux", "config": {}}
        config["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{sha256(layer)}" for layer in layers]}
        raw = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": media.OCI_MANIFEST,
            "config": {"mediaType": media.OCI_CONFIG, "digest": f"sha256:{sha256(raw)}", "size": len(raw)},
            "layers": [self._described(layer) for layer in layers],
        }
        for content in (raw, *layers):
            self.served[f"/v2/a/b/blobs/sha256:{sha256(content)}"] = ("application/octet-stream", content)
        self.served["/v2/a/b/manifests/12"] = (media.OCI_MANIFEST, json.dumps(manifest).encode())

    def fetched_whole(self) -> list[str]:
        """Blobs of layers that were asked for without a range."""
        layers = {f"/v2/a/b/blobs/sha256:{sha256(layer)}" for layer in (LSMT, CHECKED, UNCHECKED)}
        return [path.rpartition(":")[2] for path, wanted in self.asked if wanted is None and path in layers]

    def stored(self) -> set[str]:
        folder = self.store.root / "layers"
        return {path.stem for path in folder.iterdir()} if folder.exists() else set()

    @staticmethod
    def _described(layer: bytes) -> dict[str, Any]:
        digest = f"sha256:{sha256(layer)}"
        notes = {NOTE + "blob-digest": digest, NOTE + "blob-size": str(len(layer))}
        return {"mediaType": media.OCI_LAYER, "digest": digest, "size": len(layer), "annotations": notes}

    @staticmethod
    async def _copy(layer: Path, into: Path) -> None:
        shutil.copy(layer, into)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        wanted = request.headers.get("range")
        self.asked.append((request.url.path, wanted))
        if request.url.path not in self.served:
            return httpx.Response(404)
        kind, content = self.served[request.url.path]
        if wanted is None:
            return httpx.Response(200, stream=Body(content), headers={"content-type": kind})
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1]
        headers = {"content-range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
        return httpx.Response(206, stream=Body(part), headers=headers)


class Body(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    (tmp_path / "sandboxes").mkdir()
    made = Place(tmp_path)
    await made.start()
    made.prepare()
    yield made
    await made.images.close()
    await made.stop()


async def test_layers_with_checksums_stay_where_they_are(place: Place) -> None:
    place.push(CHECKED)
    info = await place.images.pull(REFERENCE, 512, lambda _: None)
    assert (info.layers, info.disk_mib) == ((sha256(CHECKED),), 64 << 10)
    assert (place.fetched_whole(), place.stored(), await place.images.images()) == ([], set(), [])


@pytest.mark.parametrize("unverifiable", [LSMT, UNCHECKED], ids=["no zfile", "zfile without checksums"])
async def test_a_layer_without_checksums_is_kept_whole(place: Place, unverifiable: bytes) -> None:
    place.push(unverifiable, CHECKED)
    info = await place.images.pull(REFERENCE, 512, lambda _: None)
    assert info.layers == (sha256(unverifiable), sha256(CHECKED))
    assert place.fetched_whole() == [sha256(unverifiable)]
    assert place.stored() == {sha256(unverifiable)}
    blob = place.repository.blob(sha256(unverifiable))
    assert blob is not None
    assert blob.origin is None
    # It is fetched once, listed while it is kept, and goes when it is removed.
    again = await place.images.pull(REFERENCE, 512, lambda _: None)
    assert (again.layers, len(place.fetched_whole())) == (info.layers, 1)
    assert [image.digest for image in await place.images.images()] == [info.digest]
    await place.repository.sweep(0.0)
    assert place.stored() == {sha256(unverifiable)}
    await place.images.remove(info.digest)
    place.host.layers.let_go(set())
    await place.repository.sweep(0.0)
    assert place.stored() == set()
