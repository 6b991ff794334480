"""The committed snapshots that this process knows, brought up to date with the store by reading only what is new.

Records and manifests never change, so a record that was read once is never read again. What cannot be read is kept
apart with its reason: nobody can start from it, and no sweep may guess what it needs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from agentenv.errors import RepositoryDamaged
from agentenv.model import Blob, SnapshotManifest
from agentenv.snapshots import records
from agentenv.snapshots.blobs import RECORDS, id_of, manifest_key, record_key
from agentenv.snapshots.codec import CorruptManifest
from agentenv.snapshots.sealing import Sealer, seal, unseal
from agentenv.snapshots.stores.interface import ObjectNotFound, Store

log = logging.getLogger(__name__)

# Objects that one operation reads at once.
PARALLEL_MAX: Final = 16
# Whatever a user may send as an id: others are nobody's.
_SNAPSHOT_ID: Final = re.compile(r"^[a-z0-9]{1,64}\Z")

S = TypeVar("S")
T = TypeVar("T")


async def gathered(asked: Iterable[S], work: Callable[[S], Awaitable[T]], parallel: int = PARALLEL_MAX) -> list[T]:
    """`work` of each, in order, so many at a time. The first error ends all."""
    slots = asyncio.Semaphore(parallel)

    async def one(item: S) -> T:
        async with slots:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in asked]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Known:
    """One snapshot, and the digest of its manifest; None in version 1, which had none."""

    snapshot: SnapshotManifest
    manifest: str | None


class Index:
    """Snapshots by id. One event loop."""

    def __init__(self, store: Store, sealer: Sealer | None = None) -> None:
        """`sealer` encrypts what of a manifest is secret; None where no key is configured."""
        self._store = store
        self._sealer = sealer
        self._known: dict[str, Known] = {}
        self._broken: dict[str, CorruptManifest] = {}
        # Ids are never used twice: what this process removed never comes back, however late a listing is.
        self._removed: set[str] = set()
        self._blobs: dict[str, Blob] = {}
        self._refreshing = asyncio.Lock()

    def fresh(self) -> Index:
        """Another one of the same repository, which knows nothing yet."""
        return Index(self._store, self._sealer)

    def encoded(self, snapshot: SnapshotManifest) -> tuple[bytes, bytes, str]:
        """Record, manifest and its digest, as they are stored."""
        return records.encode(seal(snapshot, self._sealer))

    def all(self) -> list[Known]:
        """Every snapshot that can be used, in the order of their ids."""
        return [self._known[key] for key in sorted(self._known)]

    def get(self, snapshot_id: str) -> SnapshotManifest | None:
        """One of them."""
        known = self._known.get(snapshot_id)
        return None if known is None else known.snapshot

    def broken(self) -> dict[str, CorruptManifest]:
        """Snapshots that the last refresh could not read, by id."""
        return dict(self._broken)

    def blob(self, digest: str) -> Blob | None:
        """What is known of a blob: from any snapshot that was read, or from `know`."""
        return self._blobs.get(digest)

    def know(self, blobs: Iterable[Blob]) -> None:
        """Learn of blobs that no snapshot names yet."""
        self._blobs.update((blob.digest, blob) for blob in blobs)

    def add(self, snapshot: SnapshotManifest, manifest: str | None) -> None:
        """A snapshot that was committed just now."""
        self._known[snapshot.snapshot_id] = Known(snapshot, manifest)
        self.know(snapshot.blobs.values())

    def discard(self, snapshot_id: str) -> None:
        """A snapshot that was removed just now."""
        self._known.pop(snapshot_id, None)
        self._broken.pop(snapshot_id, None)
        self._removed.add(snapshot_id)

    async def refresh(self) -> None:
        """Read what other nodes committed and forget what they removed. Raises `StoreUnavailable`."""
        async with self._refreshing:
            before = set(self._known)
            listed = {id_of(entry.key): entry.key for entry in await self._store.list(RECORDS)}
            gone = before - listed.keys()
            fresh = sorted(listed.keys() - before - self._removed)
            found = await gathered((listed[key] for key in fresh), self._read)
            for snapshot_id in gone:
                self._known.pop(snapshot_id, None)
            self._broken = {}
            for snapshot_id, read in zip(fresh, found, strict=True):
                if isinstance(read, Known) and snapshot_id not in self._removed:
                    self.add(read.snapshot, read.manifest)
                elif isinstance(read, CorruptManifest):
                    log.error("snapshot record skipped: %s", read)
                    self._broken[snapshot_id] = read

    async def fetch(self, snapshot_id: str) -> SnapshotManifest | None:
        """One snapshot that the last refresh did not know; None if there is none. Raises `RepositoryDamaged`."""
        if not _SNAPSHOT_ID.match(snapshot_id) or snapshot_id in self._removed:
            return None
        read = await self._read(record_key(snapshot_id))
        if isinstance(read, CorruptManifest):
            raise RepositoryDamaged(str(read))
        if read is None or snapshot_id in self._removed:
            return None
        self.add(read.snapshot, read.manifest)
        return read.snapshot

    async def _read(self, key: str) -> Known | CorruptManifest | None:
        """One snapshot; the reason if it cannot be read; None if it was removed meanwhile."""
        try:
            record = records.decode_record((await self._store.get(key)).content, key)
            if isinstance(record, SnapshotManifest):
                return Known(record, None) if record.snapshot_id == id_of(key) else _misnamed(key)
            if record.snapshot_id != id_of(key):
                return _misnamed(key)
            origin = manifest_key(record.manifest)
            try:
                content = (await self._store.get(origin)).content
            except ObjectNotFound:
                if await self._store.stat(key) is None:
                    return None
                return CorruptManifest(f"{key}: its manifest {origin} is missing")
            snapshot = records.decode_snapshot(record, content, origin)
            return Known(unseal(snapshot, self._sealer, origin), record.manifest)
        except ObjectNotFound:
            return None
        except CorruptManifest as error:
            return error


def _misnamed(key: str) -> CorruptManifest:
    return CorruptManifest(f"{key}: is the record of another snapshot")
