"""The lock under which one node sweeps a repository, and how everybody else waits for it.

    sweeper   creates gc/lock.json -> lists blobs -> reads holds -> reads records and images -> deletes -> removes it
    holder    writes holds/<node>.json -> looks at gc/lock.json, waits for the sweep it met there -> relies on the blob

Either the sweeper reads the hold, or the holder meets the lock: if the hold was written after the sweeper read the
holds, then the lock was there before it and is there until the last deletion. A sweeper which *ended* in between did
no harm that the holder does not see, because it looks whether the blob exists only afterwards.

Holds are read before records: a blob of which neither a hold was found nor, later, a record, was not held when the
holds were read, and was not committed before the records were read. A commit holds from before its record until after
it, so it began after the lock, and waits. (Records first would be wrong: a commit that ends and lets go between the two
readings would be seen by neither.)

No clock of one node is compared with another's. A lock is over `LOCK_S` after its last renewal: a holder counts these
from when *it* first saw this renewal, which is later. A sweeper starts deletions only `DELETE_S` from before it sent
its renewal, and each of them has a deadline, so the last one has arrived well before `LOCK_S`. What remains is what
every lease leaves: a sweeper that is suspended between looking at its clock and sending, for longer than the rest, or
(in a directory on a network file system) a deletion that the kernel still repeats after minutes without its server.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agentenv.errors import Conflict, StoreUnavailable
from agentenv.snapshots.stores.interface import Entry, ObjectNotFound, PreconditionFailed, Store

LOCK_KEY: Final = "gc/lock.json"
LOCK_S: Final = 120.0
# Deletions may start so long after a renewal; a store operation takes 60 s at most, so 20 s are left for surprises.
DELETE_S: Final = 40.0
POLL_S_FIRST: Final = 0.1
POLL_S_MAX: Final = 1.0
# How long a holder waits for one sweep at most; a sweeper keeps its rounds far shorter.
WAIT_S_MAX: Final = 600.0


@dataclass(frozen=True, slots=True)
class Process:
    """One run of one node's server. Two processes of one node never live at once: STATE is locked."""

    node_id: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def succeeds(self, node_id: str, nonce: str) -> bool:
        """Whether that process was a former one of this node, and is therefore dead."""
        return node_id == self.node_id and nonce != self.nonce


@dataclass(frozen=True, slots=True)
class Timing:
    """Time and waiting, so that tests decide what they are."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class _Lock(msgspec.Struct, frozen=True):
    version: int
    node_id: str
    process: str
    # Of one sweep; the renewals count up beside it.
    nonce: str
    renewals: int = 0


async def wait_for_sweep(store: Store, process: Process, timing: Timing) -> None:
    """Return once no sweep goes on that began before this call. Raises `StoreUnavailable` after `WAIT_S_MAX`."""
    first = await _read(store)
    if first is None or process.succeeds(first[0].node_id, first[0].process):
        return
    began = seen_at = timing.monotonic()
    nonce, seen, pause_s = first[0].nonce, first[1], POLL_S_FIRST
    while True:
        await timing.sleep(pause_s)
        pause_s = min(pause_s * 2, POLL_S_MAX)
        asked_at = timing.monotonic()
        now = await _read(store)
        if now is None or now[0].nonce != nonce:
            return
        if now[1] != seen:
            seen, seen_at = now[1], timing.monotonic()
        elif asked_at - seen_at > LOCK_S:
            return
        if asked_at - began > WAIT_S_MAX:
            raise StoreUnavailable(f"node {now[0].node_id} has been collecting for {WAIT_S_MAX:g} s")


class SweepLock:
    """The lock, held. `acquire` makes one; `keep` before each batch of deletions; `release` at the end."""

    def __init__(self, store: Store, timing: Timing, lock: _Lock, etag: str, sent_at: float) -> None:
        self._store = store
        self._timing = timing
        self._lock = lock
        self._etag = etag
        self._sent_at = sent_at

    @classmethod
    async def acquire(cls, store: Store, process: Process, timing: Timing) -> SweepLock:
        """Raises `Conflict` while another node sweeps; safe to cancel (a lock that was taken runs out by itself)."""
        mine = _Lock(1, process.node_id, process.nonce, secrets.token_hex(8))
        sent_at = timing.monotonic()
        try:
            etag = await store.put(LOCK_KEY, msgspec.json.encode(mine), if_absent=True)
        except PreconditionFailed:
            return await cls._take_over(store, process, timing, mine)
        return cls(store, timing, mine, etag, sent_at)

    @classmethod
    async def _take_over(cls, store: Store, process: Process, timing: Timing, mine: _Lock) -> SweepLock:
        there = await _read(store)
        if there is None:
            raise Conflict("another node has just collected the repository; try again")
        lock, etag = there
        if not process.succeeds(lock.node_id, lock.process) and not await _is_over(store, process):
            raise Conflict(f"node {lock.node_id} is collecting the repository")
        sent_at = timing.monotonic()
        try:
            taken = await store.put(LOCK_KEY, msgspec.json.encode(mine), if_match=etag)
        except PreconditionFailed:
            raise Conflict("another node has begun to collect the repository") from None
        return cls(store, timing, mine, taken, sent_at)

    async def entry(self) -> Entry:
        """The lock as the store lists it: its time is the store's own "now". Raises `Conflict` if it is gone."""
        found = await self._store.stat(LOCK_KEY)
        if found is None:
            raise Conflict("the lock of this collection is gone")
        return found

    async def keep(self) -> None:
        """Return when deletions may start for a while. Raises `Conflict` if another node took the lock.

        So it does when this one was too slow: holders may have stopped waiting although nobody took the lock, and to
        renew it then would not make them wait again.
        """
        if self._timing.monotonic() - self._sent_at < DELETE_S / 2:
            return
        if not self.may_delete():
            raise Conflict("this collection stood still for too long; it goes on at the next one")
        renewed = msgspec.structs.replace(self._lock, renewals=self._lock.renewals + 1)
        sent_at = self._timing.monotonic()
        try:
            self._etag = await self._store.put(LOCK_KEY, msgspec.json.encode(renewed), if_match=self._etag)
        except PreconditionFailed:
            raise Conflict("another node took over the collection of the repository") from None
        self._lock, self._sent_at = renewed, sent_at

    def may_delete(self) -> bool:
        """Whether a deletion may be sent at this instant."""
        return self._timing.monotonic() - self._sent_at < DELETE_S

    async def release(self) -> None:
        """Let the others go on. A lock that ran out may be another's by now and is left alone."""
        if self._timing.monotonic() - self._sent_at < LOCK_S / 2:
            await self._store.delete(LOCK_KEY)


async def _is_over(store: Store, process: Process) -> bool:
    """Whether the lock's last renewal is too long ago, by the store's clock: that of an object made just now."""
    key = f"gc/clock-{secrets.token_hex(6)}.json"
    await store.put(key, msgspec.json.encode(process.node_id))
    try:
        now, lock = await store.stat(key), await store.stat(LOCK_KEY)
    finally:
        await store.delete(key)
    return now is not None and lock is not None and now.modified_s - lock.modified_s > LOCK_S


async def _read(store: Store) -> tuple[_Lock, str] | None:
    try:
        found = await store.get(LOCK_KEY)
    except ObjectNotFound:
        return None
    try:
        return msgspec.json.decode(found.content, type=_Lock), found.etag
    except msgspec.MsgspecError:
        # A lock that cannot be read is a lock: it runs out like any other.
        return _Lock(0, "unknown", "", found.etag), found.etag
