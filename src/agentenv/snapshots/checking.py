"""Reading everything that a repository holds, and saying what is damaged and what depends on it. Changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import msgspec

from agentenv.errors import RepositoryDamaged
from agentenv.model import (
    BLOB_DESCRIPTOR_SUFFIX,
    Damage,
    Progress,
    Report,
    SnapshotKind,
    SnapshotManifest,
    VerifyReport,
)
from agentenv.snapshots.blobs import (
    IMAGES,
    LAYERS,
    MANIFESTS,
    STATES,
    Places,
    id_of,
    ids_of,
    is_digest,
    layer_key,
    record_key,
    state_key,
)
from agentenv.snapshots.codec import NewerManifest
from agentenv.snapshots.index import Index, gathered
from agentenv.snapshots.publishing import WorkerFailed, run_worker
from agentenv.snapshots.stores.interface import Entry, ObjectNotFound, Store

# Layers that are read at once: one core each.
LAYERS_PARALLEL: Final = 2
MISSING: Final = "is missing"


class LayerChecker(Protocol):
    """Reads a whole layer."""

    async def check(self, path: Path, digest: str | None) -> str | None:
        """What is wrong with a layer (a file or a descriptor); None for nothing. Raises what is not damage."""


class WorkerChecker:
    """aenv-storage: digest, block list, checksums of ZFile, index of LSMT."""

    def __init__(self, program: Path, stores_file: Path) -> None:
        self._program = program
        self._stores_file = stores_file

    async def check(self, path: Path, digest: str | None) -> str | None:
        """See `LayerChecker.check`."""
        is_descriptor = path.suffix == BLOB_DESCRIPTOR_SUFFIX
        subject = ["--descriptor" if is_descriptor else "--file", str(path)]
        if digest is not None and not is_descriptor:
            subject += ["--digest", digest]
        try:
            await run_worker([str(self._program), "verify", *subject, "--stores", str(self._stores_file)])
        except RepositoryDamaged as damage:
            return str(damage)
        except WorkerFailed as failed:
            if failed.kind == "not_found":
                return MISSING
            raise
        return None


class PlainChecker:
    """Compares what the store has with the digest: for stores in memory, and layers that are plain bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def check(self, path: Path, digest: str | None) -> str | None:
        """See `LayerChecker.check`."""
        layer_id = path.name.partition(".")[0]
        content = (await self._store.get(layer_key(layer_id))).content
        found = hashlib.sha256(content).hexdigest()
        return None if digest in (None, found) else f"its content has the digest {found}"


@dataclass(frozen=True, slots=True)
class Found:
    """One damaged object, by its key, and the id it holds up."""

    key: str
    detail: str
    subject: str


class Verifier:
    """One verification: everything is read afresh, whatever the process knows already."""

    def __init__(
        self,
        store: Store,
        index: Index,
        checker: LayerChecker,
        places: Places,
        report: Report,
    ) -> None:
        """`index` knows nothing yet."""
        self._store = store
        self._checker = checker
        self._places = places
        self._report = report
        self._checked_files = 0
        self._checked_bytes = 0
        self.index = index
        self.found: list[Found] = []

    async def run(self) -> VerifyReport:
        """Read it all. Raises what the store raises; never for damage."""
        self._report(Progress("reading records"))
        await self.index.refresh()
        for snapshot_id, damage in sorted(self.index.broken().items()):
            if not isinstance(damage, NewerManifest):
                self.found.append(Found(record_key(snapshot_id), str(damage), snapshot_id))
        listed = {entry.key: entry for folder in (LAYERS, STATES) for entry in await self._store.list(folder)}
        self._checked_files += len(self.index.all()) + len(self.index.broken())
        await self._find_missing(listed)
        await self._count_manifests()
        await self._check_states(listed)
        await self._check_layers(listed)
        await self._forget_removed()
        return self._verdict()

    def _verdict(self) -> VerifyReport:
        damages = [Damage("repository", f.key, f.detail, self._dependents(f.subject)) for f in self.found]
        return VerifyReport(self._checked_files, self._checked_bytes, tuple(damages))

    async def _find_missing(self, listed: Mapping[str, Entry]) -> None:
        """What a snapshot or an image names and the store does not have."""
        stored = {id_of(key) for key in listed if not key.endswith(".blocks")}
        for known in self.index.all():
            for needed in ids_of(known.snapshot) - stored - {found.subject for found in self.found}:
                is_state = needed == known.snapshot.device_state
                self.found.append(Found(state_key(needed) if is_state else layer_key(needed), MISSING, needed))
            for digest, blob in known.snapshot.blobs.items():
                key = f"{LAYERS}{digest}.blocks"
                if blob.blocks_digest is not None and digest in stored and key not in listed:
                    self.found.append(Found(key, MISSING, digest))

    async def _forget_removed(self) -> None:
        """Snapshots that were removed while this went on, and swept: nobody misses what only they needed."""
        await self.index.refresh()
        self.found = [
            each
            for each in self.found
            if each.detail != MISSING or (self._dependents(each.subject) and await self._store.stat(each.key) is None)
        ]

    async def _count_manifests(self) -> None:
        """They were read with their records. What no record names is garbage, whatever is in it."""
        named = {known.manifest for known in self.index.all()}
        for entry in await self._store.list(MANIFESTS):
            if id_of(entry.key) in named:
                self._count(entry)

    async def _check_states(self, listed: Mapping[str, Entry]) -> None:
        self._report(Progress("reading device states"))

        async def check(entry: Entry) -> None:
            try:
                content = (await self._store.get(entry.key)).content
            except ObjectNotFound:
                return
            self._count(entry)
            if is_digest(id_of(entry.key)) and hashlib.sha256(content).hexdigest() != id_of(entry.key):
                self.found.append(Found(entry.key, "its content is not what its name says", id_of(entry.key)))

        await gathered([entry for key, entry in listed.items() if key.startswith(STATES)], check)

    async def _check_layers(self, listed: Mapping[str, Entry]) -> None:
        layers = [entry for key, entry in sorted(listed.items()) if key.endswith(".lsmt")]
        total = sum(entry.stored_bytes for entry in layers)
        done = 0

        async def check(entry: Entry) -> None:
            nonlocal done
            layer_id = id_of(entry.key)
            self._report(Progress("reading layers", done, total))
            try:
                path = self._places.path(layer_id, self.index.blob(layer_id))
                damage = await self._checker.check(path, layer_id if is_digest(layer_id) else None)
            except RepositoryDamaged:
                # Garbage of a remote store: nothing describes it, and nothing needs it.
                return
            except ObjectNotFound:
                return
            done += entry.stored_bytes
            self._count(entry)
            if damage is not None:
                self.found.append(Found(entry.key, damage, layer_id))

        await gathered(layers, check, LAYERS_PARALLEL)

    def _count(self, entry: Entry) -> None:
        self._checked_files += 1
        self._checked_bytes += entry.stored_bytes

    def _dependents(self, subject: str) -> tuple[str, ...]:
        named = [self._described(known.snapshot) for known in self.index.all() if subject in ids_of(known.snapshot)]
        if subject in self.index.broken():
            named.append(f"snapshot {subject}")
        return tuple(sorted(named))

    @staticmethod
    def _described(snapshot: SnapshotManifest) -> str:
        if snapshot.kind is SnapshotKind.TEMPLATE:
            return f"template {snapshot.names[0] if snapshot.names else snapshot.snapshot_id}"
        if snapshot.kind is SnapshotKind.PAUSE:
            return f"sandbox {snapshot.source_sandbox_id}"
        return f"snapshot {snapshot.snapshot_id}"


async def images_of(store: Store) -> dict[str, str]:
    """The layer that each record of a converted one is about, by the record's key."""

    async def read(entry: Entry) -> tuple[str, str] | None:
        try:
            content = (await store.get(entry.key)).content
            return entry.key, msgspec.json.decode(content, type=_ImageRecord).layer
        except (ObjectNotFound, msgspec.MsgspecError):
            # Whatever else lies there is somebody else's to check.
            return None

    found = await gathered(await store.list(IMAGES), read)
    return dict(pair for pair in found if pair is not None)


class _ImageRecord(msgspec.Struct):
    layer: str


def with_images(report: VerifyReport, images: Mapping[str, str], stored: set[str]) -> VerifyReport:
    """The same report with the images that need what is damaged, and with what only images miss."""
    damages = []
    for damage in report.damages:
        users = [f"image {id_of(key)}" for key, layer in sorted(images.items()) if layer == id_of(damage.item)]
        damages.append(replace(damage, dependents=(*damage.dependents, *users)))
    told = {id_of(damage.item) for damage in damages}
    for key, layer in sorted(images.items()):
        if layer not in stored | told:
            damages.append(Damage("repository", layer_key(layer), MISSING, (f"image {id_of(key)}",)))
    return replace(report, damages=tuple(damages))
