"""Mending what a verification found, as far as this node has what it takes.

What cannot be read is put aside (`damaged/`, from where a person may bring it back; what it mentions is not collected
meanwhile), what this process still knows is written again, and a blob is published again whose local file is still in
staging. One thing only is deleted: a blob whose content is not what its name says, just before the right content takes
its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from agentenv.errors import AenvError
from agentenv.model import SnapshotManifest
from agentenv.snapshots import records
from agentenv.snapshots.blobs import DAMAGED, LAYERS, RECORDS, STATES, id_of, is_digest, manifest_key, record_key
from agentenv.snapshots.checking import Found
from agentenv.snapshots.codec import CorruptManifest
from agentenv.snapshots.index import Index
from agentenv.snapshots.publishing import Digester
from agentenv.snapshots.staging import Staging
from agentenv.snapshots.stores.files import translated
from agentenv.snapshots.stores.interface import ObjectNotFound, Store

log = logging.getLogger(__name__)


class Repairer:
    """Mends what a `Verifier` found, as far as the node has what it takes."""

    def __init__(
        self,
        store: Store,
        known: Index,
        republish: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`known` is what the process knew before; `republish` makes a blob again from staging, if it is there."""
        self._store = store
        self._known = known
        self._republish = republish

    async def repair(self, found: Iterable[Found]) -> dict[str, str]:
        """By key, how things were made whole. What was not is left as it is, or put aside where it cannot be read."""
        repaired: dict[str, str] = {}
        for damage in found:
            try:
                how = await self._one(damage)
            except AenvError as error:
                log.warning("%s cannot be repaired: %s", damage.key, error)
                continue
            if how is not None:
                repaired[damage.key] = how
        return repaired

    async def _one(self, damage: Found) -> str | None:
        if damage.key.startswith(RECORDS):
            snapshot = self._known.get(damage.subject)
            if snapshot is not None:
                return await self._write_again(snapshot)
            return await self._put_aside(damage.key)
        if damage.key.startswith((LAYERS, STATES)) and is_digest(damage.subject):
            return "published again from staging" if await self._republish(damage.subject) else None
        return None

    async def _write_again(self, snapshot: SnapshotManifest) -> str:
        record, manifest, digest = self._known.encoded(snapshot)
        await self._store.put(manifest_key(digest), manifest)
        await self._store.put(record_key(snapshot.snapshot_id), record)
        return "written again from what this server knew"

    async def _put_aside(self, key: str) -> str | None:
        """A record that nobody can read is no snapshot; its bytes are kept, and so is what they mention."""
        content = (await self._store.get(key)).content
        snapshot_id = id_of(key)
        await self._store.put(f"{DAMAGED}{snapshot_id}.json", content)
        await self._aside_manifest(content, key)
        await self._store.delete(key)
        return f"put aside as {DAMAGED}{snapshot_id}.json"

    async def _aside_manifest(self, content: bytes, key: str) -> None:
        """A damaged manifest is copied too, so that a sweep finds what it still mentions."""
        try:
            record = records.decode_record(content, key)
        except CorruptManifest:
            return
        if isinstance(record, SnapshotManifest):
            return
        try:
            manifest = (await self._store.get(manifest_key(record.manifest))).content
        except ObjectNotFound:
            return
        await self._store.put(f"{DAMAGED}{record.manifest}.json", manifest)


async def find_local(staging: Staging, digester: Digester, plain_digest: str, *, is_state: bool) -> Path | None:
    """The file of staging with this content. Reads all of staging: for repairs only."""
    for local_id in sorted(await asyncio.to_thread(staging.stored_ids)):
        path = staging.state(local_id) if is_state else staging.layer(local_id)
        if not path.exists():
            continue
        try:
            found = await asyncio.to_thread(_sha256, path) if is_state else (await digester.digest(path)).digest
        except AenvError as error:
            # Unfinished or damaged: it is not the one that is looked for.
            log.info("%s is passed over: %s", path, error)
            continue
        if found == plain_digest:
            return path
    return None


def _sha256(path: Path) -> str:
    with translated(f"cannot read {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
