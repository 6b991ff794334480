"""The layers that this node works with: local ones in staging, blobs of the repository, and what must not go away.

Owns the publication of local layers, and the two sets that keep collectors away: reservations (local layers that no
record names yet) and holds (blobs that this node relies on, which other nodes must leave alone). Does not own captures,
nor what a sandbox's record names, nor why a sweep is safe (`snapshots`).

An id of 24 hexadecimal digits is a local layer or device state; one of 64 is a blob of the repository.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from agentenv.errors import AenvError
from agentenv.model import Blob, DiskStack, GcReport, MemoryStack, SnapshotKind, SnapshotManifest
from agentenv.snapshots import CommittedRepository, Staging, ids_of, is_digest

log = logging.getLogger(__name__)


class Layers:
    """One event loop. Paths are for blockd; methods that publish or hold may take as long as the store does."""

    def __init__(
        self, repository: CommittedRepository, grace_s: float, tell_origin: Callable[[dict[str, str]], None]
    ) -> None:
        """`grace_s`: unneeded blobs younger than this stay in the repository. `tell_origin` hears of every place
        outside of the repository from which a blob is going to be read here."""
        self.repository = repository
        self.grace_s = grace_s
        self._tell_origin = tell_origin
        self._reservations: Counter[str] = Counter()
        # Held once each in the repository, however many sandboxes here need them.
        self._held: set[str] = set()
        # Records to remove that could not be; and whether any was removed since the last sweep.
        self._undropped: dict[str, SnapshotManifest] = {}
        self._sweep_due = False
        # What a local layer was published as: the next snapshot of the same disk need not hash it again.
        self._published: dict[str, Blob] = {}
        self._publishing: dict[str, asyncio.Task[Blob]] = {}

    @property
    def staging(self) -> Staging:
        """Where local layers lie."""
        return self.repository.staging

    def paths(self, layer_ids: Iterable[str]) -> list[str]:
        """Paths for blockd, in the same order: files, or descriptors of remote blobs."""
        return self.repository.paths(layer_ids)

    def local_path(self, layer_id: str) -> Path:
        """Where a local layer is or will be written."""
        return self.staging.layer(layer_id)

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
        """What is reserved now."""
        return set(self._reservations)

    @asynccontextmanager
    async def relied_on(self, manifest: SnapshotManifest) -> AsyncIterator[None]:
        """Make sure that no node collects the snapshot's blobs; inside, the caller makes a record that names them.

        Free where they are held already. Raises `TemplateNotFound` when another node removed the snapshot, and
        `StoreUnavailable`.
        """
        with self.reserved(*ids_of(manifest)):
            await self.hold_snapshot(manifest)
            yield

    async def hold_snapshot(self, manifest: SnapshotManifest) -> None:
        """Tell other nodes, before this returns, that the snapshot's blobs are in use here. Raises as `relied_on`."""
        for blob in manifest.blobs.values():
            if blob.origin is not None:
                self._tell_origin(blob.origin)
        ids = ids_of(manifest)
        new = {layer_id for layer_id in ids if not self.repository.is_local(layer_id)} - self._held
        if not new:
            return
        if manifest.kind is SnapshotKind.FORK:
            # It has no record; its blobs are those of its source, which is alive and holds them.
            await self.hold(new)
            return
        await self.repository.hold_snapshot(manifest)
        self._note_held(ids)

    async def hold(self, ids: Iterable[str]) -> None:
        """As `hold_snapshot`, of blobs by themselves. Raises `RepositoryDamaged` if one is not there."""
        new = {layer_id for layer_id in ids if not self.repository.is_local(layer_id)} - self._held
        if new:
            await self.repository.hold(new)
            self._note_held(new)

    def let_go(self, needed: set[str]) -> None:
        """Give up holds on what is not needed (any more). `needed` was computed without an await before this call."""
        alive = needed | self._reservations.keys()
        # A local layer that is alive may be in a commit under way, which names its blob next.
        alive |= {blob.digest for local_id, blob in self._published.items() if local_id in alive}
        idle = self._held - alive
        self._held -= idle
        self.repository.release(idle)

    def _note_held(self, ids: Iterable[str]) -> None:
        """The repository counts one hold more of each; this node keeps one."""
        ids = set(ids)
        self.repository.release(ids & self._held)
        self._held |= ids

    @asynccontextmanager
    async def reserved_name(self, name: str) -> AsyncIterator[None]:
        """Keep other snapshots of this full name from being made meanwhile. Raises `Conflict`, `StoreUnavailable`."""
        reservation = await self.repository.reserve_name(name)
        try:
            yield
        finally:
            # Not to be cut short by a client that goes away; what fails runs out by itself.
            task = asyncio.ensure_future(self.repository.release_name(reservation))
            try:
                await asyncio.shield(task)
            except AenvError as error:
                log.warning("the reservation of name %s stays for a while: %s", name, error)

    # Records that go

    async def remove_record(self, manifest: SnapshotManifest) -> None:
        """Hide a snapshot; a later sweep collects the blobs that only it named. Idempotent; raises `AenvError`."""
        await self.repository.remove(manifest.snapshot_id)
        self._sweep_due = True

    async def drop_record(self, manifest: SnapshotManifest) -> None:
        """As `remove_record` and never fails: what cannot go now (a store that is out) goes with a later sweep."""
        try:
            await self.remove_record(manifest)
        except AenvError as error:
            log.warning("the record of %s stays for now: %s", manifest.snapshot_id, error)
            self._undropped[manifest.snapshot_id] = manifest
            self._sweep_due = True

    async def sweep(self) -> GcReport | None:
        """Collect the repository if a record was removed since the last time; None if none was.

        Raises `AenvError`, `Conflict` while another node sweeps; it is due again then.
        """
        if not self._sweep_due:
            return None
        self._sweep_due = False
        undropped, self._undropped = self._undropped, {}
        for manifest in undropped.values():
            await self.drop_record(manifest)
        try:
            report = await self.repository.sweep(self.grace_s)
        except BaseException:
            self._sweep_due = True
            raise
        self._sweep_due |= report.young_files > 0
        return report

    def ask_for_sweep(self) -> None:
        """Something of the repository became garbage."""
        self._sweep_due = True

    @property
    def is_sweep_due(self) -> bool:
        """Whether the last sweep left something for the next."""
        return self._sweep_due

    # Publishing

    async def publish(self, manifest: SnapshotManifest) -> SnapshotManifest:
        """The manifest with every local layer and the device state replaced by blobs, which are durable on return.

        The caller reserves what the manifest names; the blobs are held. Raises `StorageFull`, `StoreUnavailable`,
        `OperationFailed`; what was published until then is collected.
        """
        ids = [*manifest.disk.layers, *manifest.memory.layers, manifest.device_state]
        local = [layer_id for layer_id in dict.fromkeys(ids) if self.repository.is_local(layer_id)]
        blobs = await asyncio.gather(*(self._publish_once(i, i == manifest.device_state) for i in local))
        names = {local_id: blob.digest for local_id, blob in zip(local, blobs, strict=True)}
        known = {i: blob for i in ids if is_digest(i) and (blob := self.repository.blob(i)) is not None}
        layers = tuple(names.get(i, i) for i in manifest.memory.layers)
        return replace(
            manifest,
            disk=DiskStack(manifest.disk.size_bytes, tuple(names.get(i, i) for i in manifest.disk.layers)),
            memory=MemoryStack(_image_id(layers), manifest.memory.size_bytes, layers),
            device_state=names.get(manifest.device_state, manifest.device_state),
            blobs={**known, **{blob.digest: blob for blob in blobs}},
        )

    async def _publish_once(self, local_id: str, is_state: bool) -> Blob:
        """Two snapshots that share a sealed layer publish it once. A caller that is cancelled leaves the other's be."""
        done = self._published.get(local_id)
        if done is not None and done.digest in self._held:
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
                blob = await self.repository.publish_state(self.staging.state(local_id))
            else:
                blob = await self.repository.publish_layer(self.staging.layer(local_id))
        self._note_held([blob.digest])
        self._published[local_id] = blob
        return blob

    async def close(self) -> None:
        """The server stops: publications under way end; the next one begins them anew."""
        tasks = list(self._publishing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget_published(self, gone: set[str]) -> None:
        """Local layers that were collected."""
        for local_id in gone & self._published.keys():
            del self._published[local_id]


def _image_id(layers: tuple[str, ...]) -> str:
    """The image of a stack: equal stacks share an export, and stacks that only end alike do not."""
    return hashlib.sha256("/".join(layers).encode()).hexdigest()
