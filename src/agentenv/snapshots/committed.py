"""The committed repository: what exists. A snapshot does once its record has appeared, and everything it needs with it.

Owns the order of things: hold -> blobs -> manifest -> record -> let go. Does not own how a store stores (`stores`), how
a layer becomes a blob (`publishing`), who sweeps what (`sweep`, with the argument in `gclock`), or names (`catalog`).

Every method is safe to cancel, and raises `StoreUnavailable`, `StoreRefused`, `StorageFull` or `OperationFailed` of the
store beside what it names. Ids of 24 hexadecimal digits in any argument are local layers, or those of version 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agentenv.errors import (
    AenvError,
    OperationFailed,
    RepositoryDamaged,
    StoreUnavailable,
    TemplateNotFound,
)
from agentenv.model import Blob, GcReport, Report, SnapshotManifest, TierUsage, VerifyReport
from agentenv.snapshots.blobs import (
    LAYERS,
    Descriptors,
    LocalPlaces,
    Places,
    RemotePlaces,
    id_of,
    ids_of,
    is_digest,
    layer_key,
    manifest_key,
    record_key,
    state_key,
)
from agentenv.snapshots.care import Care
from agentenv.snapshots.checking import LayerChecker, PlainChecker
from agentenv.snapshots.gclock import Process, Timing
from agentenv.snapshots.holds import Holds
from agentenv.snapshots.index import Index, gathered
from agentenv.snapshots.names import Names, Reservation
from agentenv.snapshots.publishing import Digester, Publisher
from agentenv.snapshots.sealing import Sealer
from agentenv.snapshots.staging import Staging
from agentenv.snapshots.states import StateFetcher, States
from agentenv.snapshots.stores.interface import Store
from agentenv.snapshots.stores.posix import PosixStore
from agentenv.snapshots.sweep import Sweeper
from agentenv.snapshots.usage import measure

log = logging.getLogger(__name__)

# A blob that a sweep takes between its publication and its hold is published again; the hold keeps it then.
PUBLISH_ATTEMPTS_MAX: Final = 3
# A hidden file of a put that is older was left by a crash.
TEMPORARY_S_MAX: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What other nodes did since the last look."""

    added: tuple[SnapshotManifest, ...]
    removed: tuple[str, ...]


class CommittedRepository:
    """One node's view of a repository. One event loop. `load` comes before everything else."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        staging: Staging,
        descriptors_dir: Path,
        process: Process,
        timing: Timing | None = None,
        *,
        checker: LayerChecker | None = None,
        digester: Digester | None = None,
        fetcher: StateFetcher | None = None,
        sealer: Sealer | None = None,
        location: str = "",
    ) -> None:
        """`checker` and `digester` are what `verify` and `repair` read layers with; `location` is for people.

        `fetcher` and `sealer`: where a key is configured, of device states and of what is secret in manifests.
        """
        timing = timing or Timing()
        self._store = store
        self._publisher = publisher
        self._staging = staging
        self._process = process
        self._descriptors = Descriptors(descriptors_dir)
        self._root = store.root if isinstance(store, PosixStore) else None
        self._places: Places = (
            RemotePlaces(self._descriptors) if self._root is None else LocalPlaces(self._root, self._descriptors)
        )
        self._states = States(store, self._descriptors, self._places, fetcher)
        self._index = Index(store, sealer)
        self._holds = Holds(store, process, timing)
        self._names = Names(store, process)
        self._sweeper = Sweeper(store, self._index, process, timing)
        self._sweeping = asyncio.Lock()
        self._care = Care(self._index, store, self._places, checker or PlainChecker(store))
        self._care.republish_with(staging, digester, self._publish_again)
        self._location = location or (str(self._root) if self._root is not None else "memory")
        # Layers that version 1 wrote. There are no new ones, so whether an id is one never changes.
        self._version_one: frozenset[str] = frozenset()
        # Snapshots that the caller knows of.
        self._told: set[str] = set()
        # Blobs that were seen to exist while they were held, and are held since.
        self._present: set[str] = set()

    @property
    def staging(self) -> Staging:
        """Local layers."""
        return self._staging

    @property
    def node_id(self) -> str:
        """Who commits here."""
        return self._process.node_id

    @property
    def location(self) -> str:
        """Where the repository is, for people."""
        return self._location

    async def load(self, node_id: str | None = None) -> list[SnapshotManifest]:
        """Read everything; returns all snapshots, or those that `node_id` committed (and version 1's, which has none).

        What cannot be read is skipped and told in the log, never deleted.
        """
        if self._root is not None:
            listed = {id_of(entry.key) for entry in await self._store.list(LAYERS)}
            self._version_one = frozenset(key for key in listed if not is_digest(key))
        await self._holds.load()
        await self._index.refresh()
        self._told = {snapshot.snapshot_id for snapshot in self.all()}
        return self.all(node_id)

    async def refresh(self) -> Changes:
        """Learn what other nodes committed and removed since the last time; only new records are read.

        It tells whatever the caller has not been told by `load`, `commit`, `remove` or a former `refresh`.
        """
        await self._index.refresh()
        known = {snapshot.snapshot_id: snapshot for snapshot in self.all()}
        added = tuple(known[key] for key in sorted(known.keys() - self._told))
        removed = tuple(sorted(self._told - known.keys()))
        self._told = set(known)
        return Changes(added, removed)

    def all(self, node_id: str | None = None) -> list[SnapshotManifest]:
        """What the last refresh knew. Asks nobody."""
        found = [known.snapshot for known in self._index.all()]
        return found if node_id is None else [s for s in found if s.node_id in ("", node_id)]

    async def get(self, snapshot_id: str) -> SnapshotManifest:
        """One snapshot, also if another node committed it just now. Raises `TemplateNotFound`, `RepositoryDamaged`."""
        found = self._index.get(snapshot_id) or await self._index.fetch(snapshot_id)
        if found is None:
            raise TemplateNotFound(f"snapshot '{snapshot_id[:128]}' does not exist")
        return found

    async def publish_layer(self, local: Path) -> Blob:
        """Make a sealed layer a durable blob. It is held for the caller, who calls `release` after the commit."""
        return await self._publish(local, is_state=False)

    async def publish_state(self, local: Path) -> Blob:
        """Make a device state a durable blob, held as `publish_layer` does."""
        return await self._publish(local, is_state=True)

    async def commit(self, snapshot: SnapshotManifest) -> SnapshotManifest:
        """Make the snapshot appear, durably; returns it as it was committed (with this node's id).

        Its blobs are published, and described in `snapshot.blobs`. Raises `RepositoryDamaged` if one is not there.
        `StoreUnavailable` means that it most likely does not exist; a record whose answer was lost may appear later,
        whole, and its id is not used again.
        """
        snapshot = replace(snapshot, node_id=self.node_id)
        ids = ids_of(snapshot)
        undescribed = sorted(key for key in ids if is_digest(key) and key not in snapshot.blobs)
        foreign = sorted(key for key in ids if not is_digest(key) and key not in self._version_one)
        if undescribed or foreign:
            raise OperationFailed(
                f"snapshot {snapshot.snapshot_id} names {(undescribed or foreign)[0]}, which was not published"
            )
        record, manifest, digest = self._index.encoded(snapshot)
        held = {*ids, digest}
        await self._holds.hold(held)
        try:
            await self._check_present(snapshot)
            await self._store.put(manifest_key(digest), manifest)
            await self._put_record(snapshot.snapshot_id, record)
            self._index.add(snapshot, digest)
            self._told.add(snapshot.snapshot_id)
        finally:
            self.release(held)
        return snapshot

    async def remove(self, snapshot_id: str) -> None:
        """Hide a snapshot, durably. What only it needed stays until a sweep. Idempotent."""
        await self._store.delete(record_key(snapshot_id))
        self._index.discard(snapshot_id)
        self._told.discard(snapshot_id)

    def path(self, layer_id: str) -> Path:
        """What blockd is given for a layer. Raises `RepositoryDamaged` for a remote blob of which nothing is known."""
        if not is_digest(layer_id):
            local = self._staging.layer(layer_id)
            if self._root is None or layer_id not in self._version_one:
                return local
            return self._root / layer_key(layer_id)
        return self._places.path(layer_id, self._index.blob(layer_id))

    def paths(self, layer_ids: Iterable[str]) -> list[str]:
        """`path` of each, as text, in order."""
        return [str(self.path(layer_id)) for layer_id in layer_ids]

    async def state(self, state_id: str) -> Path:
        """A device state as a local file, fetched, verified and decrypted if need be. Raises `RepositoryDamaged`."""
        if not is_digest(state_id) and state_id not in self._version_one:
            return self._staging.state(state_id)
        return await self._states.path(state_id, self._index.blob(state_id))

    def is_local(self, layer_id: str) -> bool:
        """Whether the id is a layer or state of this node's staging, and nothing that the repository has."""
        return not is_digest(layer_id) and layer_id not in self._version_one

    def know(self, blobs: Iterable[Blob]) -> None:
        """Learn of blobs that no snapshot names, so that `path` can describe them: those of converted images."""
        self._index.know(blobs)

    def blob(self, digest: str) -> Blob | None:
        """What is known of a blob."""
        return self._index.blob(digest)

    async def hold(self, ids: Iterable[str]) -> None:
        """Keep every node's sweep away from these until as many `release`s; local ids are ignored.

        Returns once it is durable and they were seen to exist. Raises `RepositoryDamaged` if one does not: then none
        is held.
        """
        wanted = self._holdable(ids)
        await self._holds.hold(wanted)
        try:
            await self._look_for({key for key in wanted if is_digest(key)} - self._present)
        except BaseException:
            self.release(wanted)
            raise

    async def hold_snapshot(self, snapshot: SnapshotManifest) -> None:
        """`hold` of all that a committed snapshot needs, by one look at its record instead of one at each blob.

        While the record is there no sweep took any of it. Raises `TemplateNotFound` if it was removed. Undo with
        `release(ids_of(snapshot))`.
        """
        wanted = self._holdable(ids_of(snapshot))
        await self._holds.hold(wanted)
        try:
            if not wanted <= self._present:
                if await self._store.stat(record_key(snapshot.snapshot_id)) is None:
                    self._index.discard(snapshot.snapshot_id)
                    raise TemplateNotFound(f"snapshot '{snapshot.snapshot_id}' was removed")
                self._present |= wanted
        except BaseException:
            self.release(wanted)
            raise

    def release(self, ids: Iterable[str]) -> None:
        """Undo one `hold` (or publication) of each."""
        self._holds.release({key for key in ids if is_digest(key) or key in self._version_one})
        self._present &= self._holds.held()

    def settle(self) -> None:
        """After recovery: all that this node still needs is held. What only its former process held is let go."""
        self._holds.settle()
        self._present &= self._holds.held()

    async def renew(self) -> None:
        """Tell the other nodes that this one lives: holds and reservations. Call it every `names.RENEW_S` seconds."""
        await self._holds.renew()
        await self._names.renew()

    async def reserve_name(self, name: str) -> Reservation:
        """Reserve a full name before the capture. Raises `Conflict` while another snapshot of this name is made."""
        return await self._names.reserve(name)

    async def release_name(self, reservation: Reservation) -> None:
        """The snapshot was committed, or given up. Idempotent."""
        await self._names.release(reservation)

    async def sweep(self, grace_s: float) -> GcReport:
        """Collect the repository (not staging). See `Sweeper.sweep`; one at a time in this process."""
        async with self._sweeping:
            # What this node let go is garbage now, and not after its next renewal.
            await self._holds.renew()
            report = await self._sweeper.sweep(grace_s)
            if isinstance(self._store, PosixStore):
                await self._store.tidy(max(grace_s, TEMPORARY_S_MAX))
            kept = self._holds.held().union(*(ids_of(known.snapshot) for known in self._index.all()))
            await asyncio.to_thread(self._descriptors.forget, kept)
            return report

    async def usage(self) -> TierUsage:
        """Sizes, shared bytes and garbage of the repository, as of now and without a lock."""
        return await measure(self._store, self._index, self._location)

    async def verify(self, report: Report) -> VerifyReport:
        """Read everything there is; nothing is changed. Takes as long as reading takes."""
        return await self._care.verify(report)

    async def repair(self, report: Report) -> VerifyReport:
        """`verify`, then make whole what this node can; see `repairing` and `care` for what that is."""
        return await self._care.repair(report)

    async def _publish_again(self, local: Path, is_state: bool) -> str:
        blob = await self._publish(local, is_state=is_state)
        self.release({blob.digest})
        return blob.digest

    def _holdable(self, ids: Iterable[str]) -> set[str]:
        return {key for key in ids if is_digest(key) or key in self._version_one}

    async def _publish(self, local: Path, *, is_state: bool) -> Blob:
        publish = self._publisher.state if is_state else self._publisher.layer
        blob = await publish(local)
        await self._holds.hold({blob.digest})
        try:
            for _ in range(PUBLISH_ATTEMPTS_MAX):
                if await self._exists(blob, is_state=is_state):
                    break
                again = await publish(local)
                if again.digest != blob.digest:
                    raise OperationFailed(f"{local} changed while it was published")
            else:
                raise RepositoryDamaged(f"{local} was published as {blob.digest}, which is not there")
        except BaseException:
            self.release({blob.digest})
            raise
        self._present.add(blob.digest)
        self._index.know([blob])
        return blob

    async def _exists(self, blob: Blob, *, is_state: bool) -> bool:
        keys = [state_key(blob.digest) if is_state else layer_key(blob.digest)]
        if blob.blocks_digest is not None and not is_state:
            keys.append(f"{LAYERS}{blob.digest}.blocks")
        return None not in await gathered(keys, self._store.stat)

    async def _check_present(self, snapshot: SnapshotManifest) -> None:
        """Layers and state exist. They are held, so they go on existing."""
        await self._look_for(ids_of(snapshot) - {snapshot.device_state} - self._present)
        state = snapshot.device_state
        if state not in self._present and await self._store.stat(state_key(state)) is None:
            raise RepositoryDamaged(f"device state {state} is missing")

    async def _look_for(self, ids: set[str]) -> None:
        """Each is a layer or a device state of the store. Raises `RepositoryDamaged` naming one that is not.

        What a registry serves is not asked for: it is there when it can be read.
        """
        ids = {key for key in ids if (blob := self._index.blob(key)) is None or blob.origin is None}

        async def look(key: str) -> str | None:
            if await self._store.stat(layer_key(key)) is None and await self._store.stat(state_key(key)) is None:
                return key
            return None

        missing = [key for key in await gathered(sorted(ids), look) if key is not None]
        if missing:
            raise RepositoryDamaged(f"layer {missing[0]} is missing from the repository")
        self._present |= ids

    async def _put_record(self, snapshot_id: str, record: bytes) -> None:
        try:
            await self._store.put(record_key(snapshot_id), record, if_absent=True)
        except StoreUnavailable:
            # The answer was lost, perhaps not the record: the caller is told that there is none.
            with suppress(AenvError):
                await self._store.delete(record_key(snapshot_id))
            raise
