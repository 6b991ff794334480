"""The layers that this node works with: local ones in staging, blobs of the repository, and what must not go away.

Owns the translation of a layer id into a path for blockd, the publication of local layers, and the two sets that keep
collectors away: reservations (local layers that no record names yet) and holds (blobs that this node relies on, which
other nodes must leave alone). Does not own captures, nor what a sandbox's record names.

An id of 24 hexadecimal digits is a local layer or device state; one of 64 is a blob of the repository.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from agentenv.errors import AenvError
from agentenv.model import DiskStack, MemoryStack, SnapshotManifest
from agentenv.node.record import manifest_layer_ids
from agentenv.snapshots import Blob, CommittedRepository, Staging, is_local

log = logging.getLogger(__name__)


class Layers:
    """One event loop. Paths are for blockd; methods that publish or hold may take as long as the store does."""

    def __init__(self, staging: Staging, repository: CommittedRepository) -> None:
        self.staging = staging
        self.repository = repository
        self._reservations: Counter[str] = Counter()
        self._held: set[str] = set()
        # Records to remove that could not be, and blobs that a removed record named.
        self._undropped: dict[str, SnapshotManifest] = {}
        self._dropped: set[str] = set()
        # What a local layer was published as: the next snapshot of the same disk need not hash it again.
        self._published: dict[str, Blob] = {}
        self._publishing: dict[str, asyncio.Task[Blob]] = {}

    def path(self, layer_id: str) -> Path:
        """Where blockd finds the layer: a file, or the descriptor of a remote blob."""
        return self.staging.layer_path(layer_id) if is_local(layer_id) else self.repository.path(layer_id)

    def paths(self, layer_ids: Iterable[str]) -> list[str]:
        """Paths for blockd, in the same order."""
        return [str(self.path(layer_id)) for layer_id in layer_ids]

    def local_path(self, layer_id: str) -> Path:
        """Where a local layer is or will be written."""
        return self.staging.layer_path(layer_id)

    async def state(self, state_id: str) -> Path:
        """The device state as a local file. Raises `StoreUnavailable`, `OperationFailed`."""
        return self.staging.state_path(state_id) if is_local(state_id) else await self.repository.state(state_id)

    # Keeping

    @contextmanager
    def reserved(self, *ids: str) -> Iterator[None]:
        """Keep collectors away from layers that no record names yet."""
        self.reserve(*ids)
        try:
            yield
        finally:
            self.release(*ids)

    def reserve(self, *ids: str) -> None:
        """As `reserved`, until as many `release`s."""
        self._reservations.update(ids)

    def release(self, *ids: str) -> None:
        """Undo one `reserve`."""
        self._reservations.subtract(ids)
        self._reservations = +self._reservations

    @property
    def reservations(self) -> set[str]:
        return set(self._reservations)

    @asynccontextmanager
    async def relied_on(self, manifest: SnapshotManifest) -> AsyncIterator[None]:
        """Make sure that no node collects the snapshot's blobs; inside, the caller makes a record that names them.

        Free when they are held already. Raises `StoreUnavailable`.
        """
        ids = manifest_layer_ids(manifest)
        with self.reserved(*ids):
            await self.hold(ids)
            yield

    async def hold(self, ids: Iterable[str]) -> None:
        """Tell other nodes, before this returns, that these blobs are in use here."""
        new = {layer_id for layer_id in ids if not is_local(layer_id)} - self._held
        if new:
            await self.repository.hold(new)
            self._held |= new

    async def let_go(self, needed: set[str]) -> None:
        """Give up holds on what is not needed (any more). `needed` was computed without an await before this call."""
        idle = self._held - needed - self.reservations
        if idle:
            self._held -= idle
            await self.repository.release(idle)

    # Records that go

    async def remove_record(self, manifest: SnapshotManifest) -> None:
        """Hide a snapshot; the next sweep collects the blobs that only it named. Idempotent; raises `AenvError`."""
        await self.repository.remove(manifest.snapshot_id)
        self._dropped |= {i for i in manifest_layer_ids(manifest) if not is_local(i)}

    async def drop_record(self, manifest: SnapshotManifest) -> None:
        """As `remove_record` and never fails: what cannot go now (a store that is out) goes with a later sweep."""
        try:
            await self.remove_record(manifest)
        except AenvError as error:
            log.warning("the record of %s stays for now: %s", manifest.snapshot_id, error)
            self._undropped[manifest.snapshot_id] = manifest

    async def sweep(self) -> int:
        """Try again what `drop_record` could not, and collect the blobs of removed records; returns how many went.

        Raises `AenvError`; the blobs are then collected next time.
        """
        undropped, self._undropped = self._undropped, {}
        for manifest in undropped.values():
            await self.drop_record(manifest)
        dropped, self._dropped = self._dropped, set()
        if not dropped:
            return 0
        try:
            return (await self.repository.sweep(0.0, only=dropped)).removed
        except BaseException:
            self._dropped |= dropped
            raise

    # Publishing

    async def publish(self, manifest: SnapshotManifest) -> SnapshotManifest:
        """The manifest with every local layer and the device state replaced by blobs, which are durable on return.

        The blobs are held. Raises `StorageFull`, `StoreUnavailable`, `OperationFailed`; what was published stays and
        is collected if no record names it.
        """
        ids = [*manifest.disk.layers, *manifest.memory.layers, manifest.device_state]
        local = [layer_id for layer_id in dict.fromkeys(ids) if is_local(layer_id)]
        blobs = await asyncio.gather(*(self._publish_once(i, i == manifest.device_state) for i in local))
        names = {local_id: blob.digest for local_id, blob in zip(local, blobs, strict=True)}
        known = {i: blob for i in ids if not is_local(i) and (blob := self.repository.blob(i)) is not None}
        layers = tuple(names.get(i, i) for i in manifest.memory.layers)
        return replace(
            manifest,
            disk=DiskStack(manifest.disk.size_bytes, tuple(names.get(i, i) for i in manifest.disk.layers)),
            memory=MemoryStack(layers[-1], manifest.memory.size_bytes, layers),
            device_state=names.get(manifest.device_state, manifest.device_state),
            blobs={**known, **{blob.digest: blob for blob in blobs}},
        )

    async def _publish_once(self, local_id: str, is_state: bool) -> Blob:
        """Two snapshots that share a sealed layer publish it once. A caller that is cancelled leaves the other's be."""
        if (done := self._published.get(local_id)) is not None:
            await self.hold([done.digest])
            return done
        task = self._publishing.get(local_id)
        if task is None:
            task = asyncio.create_task(self._publish(local_id, is_state), name=f"publish {local_id}")
            self._publishing[local_id] = task
            task.add_done_callback(lambda _: self._publishing.pop(local_id, None))
        return await asyncio.shield(task)

    async def _publish(self, local_id: str, is_state: bool) -> Blob:
        with self.reserved(local_id):
            if is_state:
                blob = await self.repository.publish_state(self.staging.state_path(local_id))
            else:
                blob = await self.repository.publish_layer(self.staging.layer_path(local_id))
        self._held.add(blob.digest)
        self._published[local_id] = blob
        return blob

    def forget_published(self, stored: set[str]) -> None:
        """Drop what is remembered of local layers that are gone."""
        self._published = {i: blob for i, blob in self._published.items() if i in stored}
