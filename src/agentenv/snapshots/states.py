"""Device states as local files: where they lie, or fetched, verified and decrypted into STATE/blobs.

A VMM loads one from a file, whole, and blockd has no part in it. Owns these copies while a start makes them; they are
forgotten with the descriptors (`Descriptors.forget`). What was encrypted lies there in plain, for its owner alone, as
what staging holds does.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from agentenv.errors import OperationFailed, RepositoryDamaged
from agentenv.model import Blob
from agentenv.snapshots.blobs import Descriptors, Places, state_key
from agentenv.snapshots.publishing import WorkerFailed, run_worker
from agentenv.snapshots.stores.interface import ObjectNotFound, Store
from agentenv.snapshots.stores.posix import PosixStore


class StateFetcher(Protocol):
    """Gets what is encrypted."""

    async def fetch(self, descriptor: Path, into: Path) -> str:
        """Write the plain bytes of a blob, whole; returns their sha256. Raises `RepositoryDamaged`,
        `StoreUnavailable`, `StorageFull`, or `OperationFailed` naming the setting without the right key."""


class WorkerFetcher:
    """aenv-storage."""

    def __init__(self, program: Path, stores_file: Path) -> None:
        self._program = program
        self._stores_file = stores_file

    async def fetch(self, descriptor: Path, into: Path) -> str:
        """See `StateFetcher.fetch`."""
        command = [str(self._program), "get", "--descriptor", str(descriptor), "--into", str(into)]
        try:
            answer = await run_worker([*command, "--stores", str(self._stores_file)])
        except WorkerFailed as failed:
            if failed.kind == "not_found":
                raise RepositoryDamaged(f"device state {descriptor.stem} is missing") from failed
            raise
        return str(answer.get("plain_digest"))


class States:
    """Local files of committed device states. One event loop."""

    def __init__(
        self, store: Store, descriptors: Descriptors, places: Places, fetcher: StateFetcher | None = None
    ) -> None:
        self._store = store
        self._root = store.root if isinstance(store, PosixStore) else None
        self._descriptors = descriptors
        self._places = places
        self._fetcher = fetcher
        # The starts of many forks ask for one state at once.
        self._fetching = WeakValueDictionary[str, asyncio.Lock]()

    async def path(self, state_id: str, blob: Blob | None) -> Path:
        """The state as a file; `blob` is what is known of it. Raises `RepositoryDamaged`, and what a fetch raises."""
        is_encrypted = blob is not None and blob.encryption is not None
        if self._root is not None and not is_encrypted:
            return self._root / state_key(state_id)
        path = self._descriptors.state_path(state_id)
        plain_digest = blob.plain_digest if blob is not None else state_id
        async with self._fetching.setdefault(state_id, asyncio.Lock()):
            if not await asyncio.to_thread(_is_whole, path, plain_digest):
                if blob is not None and is_encrypted:
                    await self._decrypt(blob, path)
                else:
                    await self._get(state_id, path)
        return path

    async def _decrypt(self, blob: Blob, path: Path) -> None:
        if self._fetcher is None:
            raise OperationFailed(f"device state {blob.digest} is encrypted, which this repository cannot read")
        found = await self._fetcher.fetch(self._places.state_path(blob), path)
        if found != blob.plain_digest:
            raise RepositoryDamaged(f"device state {blob.digest} holds other content than its snapshot says")

    async def _get(self, state_id: str, path: Path) -> None:
        try:
            content = (await self._store.get(state_key(state_id))).content
        except ObjectNotFound as error:
            raise RepositoryDamaged(f"device state {state_id} is missing") from error
        if hashlib.sha256(content).hexdigest() != state_id:
            raise RepositoryDamaged(f"device state {state_id} has other content than its name says")
        await asyncio.to_thread(self._descriptors.write, path, content)


def _is_whole(path: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except FileNotFoundError:
        return False
