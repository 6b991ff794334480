"""Nodes over one store, for tests of the committed repository: small files instead of layers, no blockd."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from agentenv.model import (
    Blob,
    DiskStack,
    MachineFingerprint,
    MemoryStack,
    Resources,
    SnapshotKind,
    SnapshotManifest,
)
from agentenv.snapshots import CommittedRepository, Process, Staging, new_local_id
from agentenv.snapshots.gclock import Timing
from agentenv.snapshots.publishing import LinkPublisher, PlainPublisher, Publisher
from agentenv.snapshots.stores import MemoryStore, PosixStore, Store
from agentenv.snapshots.stores.files import Files

MACHINE = MachineFingerprint("qemu", "tcg", "7.2", "max", "6.12", 2_600_000, "abc")
Made = dict[str, SnapshotManifest]


@dataclass(frozen=True, slots=True)
class PlainDigest:
    """What blockd would answer."""

    digest: str
    size_bytes: int


class FakeDigester:
    """A blockd whose layers are their own canonical bytes."""

    async def digest(self, path: str | Path) -> PlainDigest:
        content = await asyncio.to_thread(Path(path).read_bytes)
        return PlainDigest(hashlib.sha256(content).hexdigest(), len(content))


class Node:
    """One node: its staging and its view of the repository. `restart` is a new process of the same node."""

    def __init__(
        self, name: str, store: Store, state: Path, timing: Timing | None = None, files: Files | None = None
    ) -> None:
        self.name = name
        self.store = store
        self.state = state
        self.timing = timing
        self.files = files
        self.staging = Staging(state / "staging", files)
        self.repository = self._open()

    def _open(self) -> CommittedRepository:
        publisher: Publisher = PlainPublisher(self.store)
        if isinstance(self.store, PosixStore):
            publisher = LinkPublisher(self.store, FakeDigester())
        return CommittedRepository(
            self.store, publisher, self.staging, self.state / "blobs", Process(self.name), self.timing
        )

    async def restart(self) -> None:
        """Forget everything that is not stored."""
        self.repository = self._open()
        await self.repository.load()

    def layer(self, content: bytes) -> Path:
        """A new local layer."""
        path = self.staging.layer(new_local_id())
        path.write_bytes(content)
        return path

    def device_state(self, content: bytes) -> Path:
        """A new local device state."""
        path = self.staging.state(new_local_id())
        path.write_bytes(content)
        return path

    async def publish(self, *contents: bytes) -> list[Blob]:
        """Layers of these contents, published and held."""
        return [await self.repository.publish_layer(self.layer(content)) for content in contents]

    async def snapshot(
        self, snapshot_id: str, *contents: bytes, upon: SnapshotManifest | None = None
    ) -> SnapshotManifest:
        """A committed snapshot whose top layers and state have these contents; a fork shares `upon`'s layers."""
        state = await self.repository.publish_state(self.device_state(b"state of " + b"".join(contents)))
        try:
            layers = await self.publish(*contents)
            try:
                manifest = described(snapshot_id, layers, state, upon)
                return await self.repository.commit(manifest)
            finally:
                self.repository.release(blob.digest for blob in layers)
        finally:
            self.repository.release([state.digest])


def described(
    snapshot_id: str, layers: list[Blob], state: Blob, upon: SnapshotManifest | None = None
) -> SnapshotManifest:
    """A snapshot of these blobs."""
    below = upon.disk.layers if upon is not None else ()
    blobs = {blob.digest: blob for blob in [*layers, state]}
    if upon is not None:
        blobs |= {digest: upon.blobs[digest] for digest in below}
    return SnapshotManifest(
        snapshot_id=snapshot_id,
        kind=SnapshotKind.SNAPSHOT,
        created_at=1.0,
        resources=Resources(1, 512, 2048),
        disk=DiskStack(1 << 30, (*below, *(blob.digest for blob in layers))),
        memory=MemoryStack("m", 512 << 20, (layers[-1].digest,)),
        device_state=state.digest,
        machine=MACHINE,
        token_owner="",
        names=(f"{snapshot_id}:default",),
        blobs=blobs,
        parent_snapshot_id=upon.snapshot_id if upon is not None else "",
        image_config={"Env": ["A=1"], "User": "app"},
    )


async def content_ids(store: Store) -> set[str]:
    """Ids of all content in the store."""
    entries = [entry for folder in ("layers/", "states/", "manifests/") for entry in await store.list(folder)]
    return {entry.key.rpartition("/")[2].partition(".")[0] for entry in entries}


def make_store(kind: str, tmp_path: Path) -> Store:
    """An empty store by name."""
    return MemoryStore() if kind == "memory" else PosixStore(tmp_path / "repository")
