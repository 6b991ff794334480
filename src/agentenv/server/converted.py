"""What was converted of OCI images, as objects of the repository: images by digest and size, over layers by chain key.

    images/<digest>-<disk MiB>.json    {"version": 1, "image": ImageInfo}

Like the layers' own objects (`snapshots.converted`) they keep what they name from every sweep. A layer's object is
needed while some image has the layer; `tidy` and `forget` remove the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import msgspec

from agentenv.images.convert import ConvertedLayer
from agentenv.model import ImageInfo
from agentenv.snapshots import CommittedRepository, Store
from agentenv.snapshots.blobs import IMAGES, id_of
from agentenv.snapshots.converted import ConvertedLayers
from agentenv.snapshots.index import gathered
from agentenv.snapshots.stores.interface import Entry, ObjectNotFound

# A layer whose image is still being converted has no image yet.
UNCLAIMED_S: Final = 6 * 3600.0
DESCRIPTOR_SUFFIX: Final = ".blob"


class Compacter(Protocol):
    """blockd, as far as this module knows it."""

    async def compact(self, layer: str | Path, into: str | Path) -> object:
        """Write a layer, remote or not, as a plain file."""


class _Image(msgspec.Struct, frozen=True):
    version: int
    image: ImageInfo


class ConvertedStore:
    """`images.convert.ConvertedLayers` over the repository, and the list of images. One event loop."""

    def __init__(self, repository: CommittedRepository, store: Store, block: Compacter, plain_dir: Path) -> None:
        """`plain_dir` holds plain copies of remote layers while they are parents of conversions."""
        self._repository = repository
        self._records = ConvertedLayers(store, repository)
        self._store = store
        self._block = block
        self._plain_dir = plain_dir
        self._copying: dict[str, asyncio.Lock] = {}

    async def get(self, chain_key: str) -> ConvertedLayer | None:
        """See `images.convert.ConvertedLayers.get`."""
        found = await self._records.get(chain_key)
        return None if found is None else ConvertedLayer(found.blob.digest, found.parent)

    async def put(self, chain_key: str, layer: Path, parent_id: str | None) -> ConvertedLayer:
        """See `images.convert.ConvertedLayers.put`."""
        made = await self._records.put(chain_key, layer, parent_id)
        return ConvertedLayer(made.blob.digest, made.parent)

    async def local_file(self, layer_id: str) -> Path:
        """The layer as a plain file; a remote one is copied once, until `drop_copies`."""
        path = self._repository.path(layer_id)
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
        found = await gathered([entry.key for entry in entries], self._read)
        return [image for image in found if image is not None]

    async def remember(self, image: ImageInfo) -> None:
        """Add or replace an image; a name that is new comes first."""
        key = _image_key(image)
        there = await self._read(key)
        if there is not None:
            names = tuple(dict.fromkeys((*image.references, *there.references)))
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
        entries = {id_of(entry.key): entry.modified_s for entry in await self._store.list(IMAGES)}
        newest_s = max(entries.values(), default=0.0)
        needed = {layer for image in await self.images() for layer in image.layers}
        for chain_key, found in (await self._records.all()).items():
            if found.blob.digest not in needed and newest_s - entries.get(chain_key, newest_s) > UNCLAIMED_S:
                await self._records.remove(chain_key)

    async def _forget_layers(self, gone: set[str]) -> None:
        for chain_key, found in (await self._records.all()).items() if gone else ():
            if found.blob.digest in gone:
                await self._records.remove(chain_key)

    async def _read(self, key: str) -> ImageInfo | None:
        try:
            return msgspec.json.decode((await self._store.get(key)).content, type=_Image).image
        except (ObjectNotFound, msgspec.MsgspecError):
            # One that cannot be read is made again by the next pull.
            return None


def _image_key(image: ImageInfo) -> str:
    return f"{IMAGES}{image.digest.removeprefix('sha256:')}-{image.disk_mib}.json"


def _is_image(entry: Entry) -> bool:
    """A chain key is a digest alone."""
    return "-" in entry.key
