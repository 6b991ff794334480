"""What OCI layers became: `images/<chain key>.json` says which blob a converted layer is. They keep their blobs.

    {"version": 1, "layer": digest, "parent": digest or null, "blob": {the fields of `Blob`}}

Does not own what a chain key is, nor which image has which (`images`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from agentenv.errors import RepositoryDamaged
from agentenv.model import Blob
from agentenv.snapshots.blobs import IMAGES, id_of, quoted
from agentenv.snapshots.committed import CommittedRepository
from agentenv.snapshots.index import gathered
from agentenv.snapshots.stores.interface import ObjectNotFound, Store

# How long a layer that was looked up stays although no image names it yet. A request that converts has 6 hours
# (`api.images`), and its first layer must be there still when its last one is.
LOOKED_UP_S: Final = 7 * 3_600.0


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted layer, and the layer under it (None: it holds the file system)."""

    blob: Blob
    parent: str | None


class _Record(msgspec.Struct, frozen=True):
    version: int
    layer: str
    parent: str | None
    blob: Blob


class ConvertedLayers:
    """The records of one repository. One event loop."""

    def __init__(self, store: Store, repository: CommittedRepository) -> None:
        self._store = store
        self._repository = repository
        # The ends of holds by layer, oldest first.
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}

    async def get(self, chain_key: str) -> Converted | None:
        """The layer, held for `LOOKED_UP_S`; None where there is none, or where its blob is gone."""
        try:
            raw = (await self._store.get(_key(chain_key))).content
            record = msgspec.json.decode(raw, type=_Record)
        except (ObjectNotFound, msgspec.MsgspecError):
            return None
        self._repository.know([record.blob])
        try:
            await self._repository.hold([record.layer])
        except RepositoryDamaged:
            return None
        self._release_later(record.layer)
        return Converted(record.blob, record.parent)

    async def put(self, chain_key: str, layer: Path, parent: str | None) -> Converted:
        """Publish a layer, durably, and record it in the place of an older one; held as by `get`."""
        blob = await self._repository.publish_layer(layer)
        self._release_later(blob.digest)
        await self._store.put(_key(chain_key), msgspec.json.encode(_Record(1, blob.digest, parent, blob)))
        return Converted(blob, parent)

    async def remove(self, chain_key: str) -> None:
        """Forget a conversion: its blob is garbage unless a snapshot has it. Idempotent."""
        await self._store.delete(_key(chain_key))

    async def all(self) -> Mapping[str, Converted]:
        """Every conversion by its chain key; unreadable ones are left out."""

        async def read(key: str) -> tuple[str, Converted] | None:
            try:
                record = msgspec.json.decode((await self._store.get(key)).content, type=_Record)
            except (ObjectNotFound, msgspec.MsgspecError):
                return None
            return id_of(key), Converted(record.blob, record.parent)

        found = await gathered([entry.key for entry in await self._store.list(IMAGES)], read)
        return dict(pair for pair in found if pair is not None)

    def settle(self, digests: Iterable[str]) -> None:
        """End one hold of `get` or `put` of each layer early: its caller has named it in a record of its own."""
        for digest in digests:
            if digest in self._timers:
                self._timers[digest][0].cancel()
                self._release(digest)

    def _release_later(self, digest: str) -> None:
        timer = asyncio.get_running_loop().call_later(LOOKED_UP_S, self._release, digest)
        self._timers.setdefault(digest, []).append(timer)

    def _release(self, digest: str) -> None:
        timers = self._timers[digest]
        timers.pop(0)
        if not timers:
            del self._timers[digest]
        self._repository.release([digest])


def _key(chain_key: str) -> str:
    return f"{IMAGES}{quoted(chain_key)}.json"
