"""What was converted of OCI images, as objects of the repository: layers by chain key, and images by digest and size.

    images/<chain key>.json            {"version": 1, "layer": Blob, "parent_id": layer id | null}
    images/<digest>-<disk MiB>.json    {"version": 1, "image": ImageInfo}

Both keep what they name from every sweep (`snapshots.sweep` marks the ids in `images/`). A layer's object is needed
while some image has the layer; `tidy` removes the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from agentenv.errors import RepositoryDamaged
from agentenv.images.convert import ConvertedLayer
from agentenv.model import Blob, ImageInfo
from agentenv.node.layers import Layers
from agentenv.snapshots import Store
from agentenv.snapshots.blobs import IMAGES
from agentenv.snapshots.stores.interface import Entry, ObjectNotFound

# A layer whose image is still being converted has no image yet.
UNCLAIMED_S: Final = 6 * 3600.0
DESCRIPTOR_SUFFIX: Final = ".blob"


_T = TypeVar("_T")


class Compacter(Protocol):
    """blockd, as far as this module knows it."""

    async def compact(self, layer: str | Path, into: str | Path) -> object:
        """Write a layer, remote or not, as a plain file."""


class _Layer(msgspec.Struct, frozen=True):
    version: int
    layer: Blob
    parent_id: str | None


class _Image(msgspec.Struct, frozen=True):
    version: int
    image: ImageInfo


class ConvertedStore:
    """`images.convert.ConvertedLayers` over the repository, and the list of images. One event loop."""

    def __init__(self, layers: Layers, store: Store, block: Compacter, plain_dir: Path) -> None:
        """`plain_dir` holds plain copies of remote layers while they are parents of conversions."""
        self._layers = layers
        self._store = store
        self._block = block
        self._plain_dir = plain_dir
        self._copying: dict[str, asyncio.Lock] = {}

    async def get(self, chain_key: str) -> ConvertedLayer | None:
        """See `ConvertedLayers.get`. A layer that is gone counts as not converted."""
        found = await self._read(f"{IMAGES}{chain_key}.json", _Layer)
        if found is None:
            return None
        self._layers.repository.know([found.layer])
        try:
            await self._layers.hold([found.layer.digest])
        except RepositoryDamaged:
            return None
        return ConvertedLayer(found.layer.digest, found.parent_id)

    async def put(self, chain_key: str, layer: Path, parent_id: str | None) -> ConvertedLayer:
        """See `ConvertedLayers.put`."""
        async with self._layers.published_file(layer) as blob:
            body = msgspec.json.encode(_Layer(1, blob, parent_id))
            await self._store.put(f"{IMAGES}{chain_key}.json", body)
        return ConvertedLayer(blob.digest, parent_id)

    async def local_file(self, layer_id: str) -> Path:
        """The layer as a plain file; a remote one is copied once, until `drop_copies`."""
        path = self._layers.repository.path(layer_id)
        if path.suffix != DESCRIPTOR_SUFFIX:
            return path
        copy = self._plain_dir / f"{layer_id}.lsmt"
        async with self._copying.setdefault(layer_id, asyncio.Lock()):
            if not copy.exists():
                await asyncio.to_thread(self._plain_dir.mkdir, parents=True, exist_ok=True)
                await self._block.compact(path, copy)
        return copy

    def drop_copies(self) -> None:
        """Remove the plain copies; nothing is being converted."""
        for copy in self._plain_dir.glob("*"):
            copy.unlink(missing_ok=True)
        self._copying.clear()

    # Images

    async def images(self) -> list[ImageInfo]:
        """All images, of every disk size."""
        entries = [entry for entry in await self._store.list(IMAGES) if _is_image(entry)]
        found = await asyncio.gather(*(self._read(entry.key, _Image) for entry in entries))
        return [record.image for record in found if record is not None]

    async def remember(self, image: ImageInfo) -> None:
        """Add or replace an image; a name that is new comes first."""
        key = _image_key(image)
        there = await self._read(key, _Image)
        if there is not None:
            names = tuple(dict.fromkeys((*image.references, *there.image.references)))
            image = replace(image, references=names)
        await self._store.put(key, msgspec.json.encode(_Image(1, image)))

    async def forget(self, digest: str) -> int:
        """Remove an image for every disk size, and the layers that no other image has; returns how many went."""
        images = await self.images()
        gone = [image for image in images if image.digest == digest]
        needed = {layer for image in images if image.digest != digest for layer in image.layers}
        for image in gone:
            await self._store.delete(_image_key(image))
        await self._forget_layers({layer for image in gone for layer in image.layers} - needed)
        return len(gone)

    async def tidy(self) -> None:
        """Remove the objects of layers whose image never came to be: of conversions that failed."""
        entries = await self._store.list(IMAGES)
        newest_s = max((entry.modified_s for entry in entries), default=0.0)
        needed = {layer for image in await self.images() for layer in image.layers}
        for entry in entries:
            if not _is_image(entry) and newest_s - entry.modified_s > UNCLAIMED_S:
                found = await self._read(entry.key, _Layer)
                if found is not None and found.layer.digest not in needed:
                    await self._store.delete(entry.key)

    async def _forget_layers(self, gone: set[str]) -> None:
        for entry in await self._store.list(IMAGES) if gone else ():
            if not _is_image(entry):
                found = await self._read(entry.key, _Layer)
                if found is not None and found.layer.digest in gone:
                    await self._store.delete(entry.key)

    async def _read(self, key: str, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode((await self._store.get(key)).content, type=kind)
        except (ObjectNotFound, msgspec.MsgspecError):
            # One that cannot be read is made again by the next conversion.
            return None


def _image_key(image: ImageInfo) -> str:
    return f"{IMAGES}{image.digest.removeprefix('sha256:')}-{image.disk_mib}.json"


def _is_image(entry: Entry) -> bool:
    """A chain key is a digest alone."""
    return "-" in entry.key
