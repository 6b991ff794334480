"""A store in a dictionary: for tests of everything above, where time is what the test says it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from agentenv.clock import Clock, RealClock
from agentenv.snapshots.stores.interface import (
    Entry,
    Object,
    ObjectNotFound,
    PreconditionFailed,
    check_folder,
    check_key,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    content: bytes
    etag: str
    modified_s: float


class MemoryStore:
    """`Store` in memory. Several repositories over one instance are several nodes over one store."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()
        self._objects: dict[str, _Stored] = {}

    async def get(self, key: str) -> Object:
        """See `Store.get`."""
        stored = self._objects.get(check_key(key))
        if stored is None:
            raise ObjectNotFound(f"there is no {key}")
        return Object(stored.content, stored.etag)

    async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """See `Store.put`."""
        there = self._objects.get(check_key(key))
        conditional = if_absent or if_match is not None
        if conditional and there is not None and there.content == content:
            return there.etag
        if if_absent and there is not None:
            raise PreconditionFailed(f"{key} is there already")
        if if_match is not None and (there is None or there.etag != if_match):
            raise PreconditionFailed(f"{key} is not what it was")
        etag = hashlib.sha256(content).hexdigest()
        self._objects[key] = _Stored(bytes(content), etag, self._clock.wall())
        return etag

    async def list(self, folder: str) -> list[Entry]:
        """See `Store.list`."""
        check_folder(folder)
        return [self._entry(key) for key in sorted(self._objects) if key.startswith(folder)]

    async def stat(self, key: str) -> Entry | None:
        """See `Store.stat`."""
        return self._entry(key) if check_key(key) in self._objects else None

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._objects.pop(check_key(key), None)

    def _entry(self, key: str) -> Entry:
        stored = self._objects[key]
        return Entry(key, len(stored.content), stored.modified_s, len(stored.content))
