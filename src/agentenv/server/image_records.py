"""The images that were converted, as objects of the repository beside those of their layers.

    images/<digest>-<disk MiB>.json    {"version": 1, "image": ImageInfo}

Like the layers' own objects (`snapshots.converted`) they keep what they name from every sweep. A layer's object is
needed while some image has the layer; `forget` and `tidy` remove the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from agentenv.model import ImageInfo
from agentenv.snapshots import Store
from agentenv.snapshots.blobs import IMAGES, id_of
from agentenv.snapshots.converted import LOOKED_UP_S, ConvertedLayers
from agentenv.snapshots.index import gathered
from agentenv.snapshots.names import store_now
from agentenv.snapshots.stores.interface import Entry, ObjectNotFound

# A layer whose image is still being converted has no image yet. While it is held, on whichever node, it may get one.
UNCLAIMED_S: Final = LOOKED_UP_S


class _Record(msgspec.Struct, frozen=True):
    version: int
    image: ImageInfo


class ImageRecords:
    """All images of one repository. One event loop."""

    def __init__(self, store: Store, layers: ConvertedLayers) -> None:
        self._store = store
        self._layers = layers

    async def all(self) -> list[ImageInfo]:
        """All images, of every disk size."""
        entries = [entry.key for entry in await self._store.list(IMAGES) if _is_image(entry)]
        return [image for image in await gathered(entries, self._read) if image is not None]

    async def remember(self, image: ImageInfo) -> None:
        """Add or replace an image; a name that is new comes first. Its conversion's own holds end, so that the layers
        go when the image does."""
        there = await self._read(_key(image))
        if there is not None:
            image = replace(image, references=tuple(dict.fromkeys((*image.references, *there.references))))
        await self._store.put(_key(image), msgspec.json.encode(_Record(1, image)))
        self._layers.settle(image.layers)

    async def forget(self, digest: str) -> int:
        """Remove an image for every disk size, and the layers that no other image has; returns how many went."""
        images = await self.all()
        gone = [image for image in images if image.digest == digest]
        needed = {layer for image in images if image.digest != digest for layer in image.layers}
        for image in gone:
            await self._store.delete(_key(image))
        unneeded = {layer for image in gone for layer in image.layers} - needed
        for chain_key, found in (await self._layers.all()).items() if unneeded else ():
            if found.blob.digest in unneeded:
                await self._layers.remove(chain_key)
        return len(gone)

    async def tidy(self) -> int:
        """Remove the objects of layers whose image never came to be, older than `UNCLAIMED_S`; returns how many.

        They are of conversions that failed. One that has just looked such a layer up, here or on another node, goes on
        undisturbed: the blob is held, only that it need not be converted again is forgotten. Raises `StoreUnavailable`.
        """
        entries = {id_of(entry.key): entry.modified_s for entry in await self._store.list(IMAGES)}
        if not entries:
            return 0
        now_s = await store_now(self._store)
        layers = await self._layers.all()
        # An image that appears after this keeps its layers by itself.
        needed = {layer for image in await self.all() for layer in image.layers}
        removed = 0
        for chain_key, found in layers.items():
            is_old = now_s - entries.get(chain_key, now_s) > UNCLAIMED_S
            if is_old and found.blob.digest not in needed:
                await self._layers.remove(chain_key)
                removed += 1
        return removed

    async def _read(self, key: str) -> ImageInfo | None:
        try:
            return msgspec.json.decode((await self._store.get(key)).content, type=_Record).image
        except (ObjectNotFound, msgspec.MsgspecError):
            # One that cannot be read is made again by the next pull.
            return None


def _key(image: ImageInfo) -> str:
    return f"{IMAGES}{image.digest.removeprefix('sha256:')}-{image.disk_mib}.json"


def _is_image(entry: Entry) -> bool:
    """A chain key is a digest alone."""
    return "-" in entry.key
