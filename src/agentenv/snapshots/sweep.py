"""Mark and sweep over a repository that other nodes use meanwhile. Why that is safe is said in `gclock`.

Marked is what a record, a hold or an image record names; everything else in `layers/`, `states/` and `manifests/`
that is older than the grace is deleted, in rounds, so that nobody waits for a lock for long. The grace is not what
makes it safe (it may be 0); it keeps what may be wanted again, and forgives what the docs of a store promise wrongly.
A record that cannot be read stops the sweep: what it needs is unknown, and would be taken for garbage.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from agentenv.errors import RepositoryDamaged
from agentenv.model import GcReport
from agentenv.snapshots.blobs import (
    DAMAGED,
    HOLDS,
    IMAGES,
    LAYERS,
    MANIFESTS,
    NAMES,
    STATES,
    TRACES,
    id_of,
    ids_of,
)
from agentenv.snapshots.gclock import LOCK_KEY, Process, SweepLock, Timing
from agentenv.snapshots.holds import HOLD_S_MAX, ids_in
from agentenv.snapshots.index import Index, gathered
from agentenv.snapshots.names import RESERVED_S
from agentenv.snapshots.stores.interface import Entry, ObjectNotFound, Store

log = logging.getLogger(__name__)

# Deletions of one batch, and of one round under one lock.
BATCH: Final = 64
ROUND: Final = 2_048
CONTENT_FOLDERS: Final = (LAYERS, STATES, MANIFESTS)
_CLOCK_S_MAX: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Marks:
    """What is needed, and by what."""

    by_snapshots: frozenset[str]
    by_holds: frozenset[str]
    by_images: frozenset[str]
    by_damaged: frozenset[str]

    def all(self) -> frozenset[str]:
        """Ids that must stay."""
        return self.by_snapshots | self.by_holds | self.by_images | self.by_damaged


async def mark(store: Store, index: Index, now_s: float, *, strict: bool = True) -> Marks:
    """Read what is needed: holds first, then records and images (see `gclock` for the order).

    Raises `RepositoryDamaged` where a record cannot be read; not `strict`, which is for reports, it leaves that out.
    """
    holds = [entry for entry in await store.list(HOLDS) if now_s - entry.modified_s <= HOLD_S_MAX]
    held = await _mentioned(store, holds)
    await index.refresh()
    broken = index.broken()
    if broken and strict:
        first = broken[min(broken)]
        raise RepositoryDamaged(f"nothing can be collected while a record cannot be read ({first}): repair first")
    images = await _mentioned(store, await store.list(IMAGES))
    aside = await _mentioned(store, await store.list(DAMAGED))
    # A record that was put aside mentions its manifest, and that one the layers.
    asides = [entry for entry in await store.list(MANIFESTS) if id_of(entry.key) in aside] if aside else []
    aside |= await _mentioned(store, asides)
    needed: set[str] = set()
    for known in index.all():
        needed |= ids_of(known.snapshot)
        if known.manifest is not None:
            needed.add(known.manifest)
    return Marks(frozenset(needed), frozenset(held), frozenset(images), frozenset(aside))


async def _mentioned(store: Store, entries: list[Entry]) -> set[str]:
    found: set[str] = set()
    for ids in await gathered(entries, lambda entry: _ids_of_object(store, entry.key)):
        found |= ids
    return found


async def _ids_of_object(store: Store, key: str) -> set[str]:
    try:
        return ids_in((await store.get(key)).content)
    except ObjectNotFound:
        return set()


class Sweeper:
    """Collections by one process. One event loop; the caller sees to one at a time."""

    def __init__(self, store: Store, index: Index, process: Process, timing: Timing) -> None:
        self._store = store
        self._index = index
        self._process = process
        self._timing = timing

    async def sweep(self, grace_s: float) -> GcReport:
        """Delete what nothing needs and is older than `grace_s`.

        Raises `Conflict` while another node sweeps or when one took over, `RepositoryDamaged` as `mark` does, and what
        the store raises; what was deleted until then was garbage. Safe to cancel.
        """
        removed = freed = 0
        # Whatever takes long is read before the lock is taken.
        await self._index.refresh()
        while True:
            report, is_done = await self._round(grace_s)
            removed, freed = removed + report.removed_files, freed + report.freed_bytes
            if is_done:
                return GcReport(grace_s, removed, freed, report.young_files, report.young_bytes)

    async def _round(self, grace_s: float) -> tuple[GcReport, bool]:
        """One lock's worth; whether nothing is left to do."""
        lock = await SweepLock.acquire(self._store, self._process, self._timing)
        try:
            now_s = (await lock.entry()).modified_s
            stored = [entry for folder in CONTENT_FOLDERS for entry in await self._store.list(folder)]
            # Before the records are read: a trace that is listed belongs to a record that was there.
            traces = await self._store.list(TRACES)
            marks = (await mark(self._store, self._index, now_s)).all()
            known = {known.snapshot.snapshot_id for known in self._index.all()}
            others = [entry for entry in traces if id_of(entry.key) not in known] + await self._leftovers(now_s)
            garbage = [entry for entry in stored if id_of(entry.key) not in marks]
            doomed = [entry for entry in garbage if now_s - entry.modified_s >= grace_s]
            young = [entry for entry in garbage if now_s - entry.modified_s < grace_s]
            # A layer before its list of blocks: where both are named by one id, the rest is found by the next sweep.
            batch = [*sorted(doomed, key=lambda e: e.key.endswith(".blocks")), *others][:ROUND]
            removed, freed = await self._delete(lock, batch)
        finally:
            await lock.release()
        report = GcReport(grace_s, removed, freed, len(young), sum(entry.stored_bytes for entry in young))
        return report, len(batch) == len(doomed) + len(others)

    async def _delete(self, lock: SweepLock, doomed: list[Entry]) -> tuple[int, int]:
        removed = freed = 0
        for start in range(0, len(doomed), BATCH):
            batch = doomed[start : start + BATCH]
            await lock.keep()

            async def delete(entry: Entry) -> bool:
                if not lock.may_delete() or not await self._is_as_listed(entry):
                    return False
                await self._store.delete(entry.key)
                return True

            for entry, is_deleted in zip(batch, await gathered(batch, delete), strict=True):
                removed += is_deleted
                freed += entry.stored_bytes if is_deleted else 0
        return removed, freed

    async def _leftovers(self, now_s: float) -> list[Entry]:
        """Reservations that ran out, and clocks that nobody reads.

        Holds that ran out stay, unread: their node may be back and write its own again while this goes on.
        """
        found = []
        for folder, age_s in ((NAMES, RESERVED_S), ("gc/", _CLOCK_S_MAX)):
            found += [entry for entry in await self._store.list(folder) if now_s - entry.modified_s > age_s]
        return [entry for entry in found if entry.key != LOCK_KEY]

    async def _is_as_listed(self, entry: Entry) -> bool:
        """Whether a reservation is still the one that ran out. What is content is guarded by holds instead."""
        if entry.key.startswith(CONTENT_FOLDERS):
            return True
        now = await self._store.stat(entry.key)
        return now is not None and now.modified_s == entry.modified_s
