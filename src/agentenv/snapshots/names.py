"""Reservations of names: of two nodes which make a snapshot `base:default` at once, one is told before it starts.

A reservation is not the truth about names: that is the newest record which carries one (`catalog`). It lasts
`RESERVED_S` from its last renewal by the store's clock, and no longer than the process that made it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import msgspec

from agentenv.errors import Conflict
from agentenv.snapshots.blobs import NAMES, quoted
from agentenv.snapshots.gclock import Process
from agentenv.snapshots.stores.interface import ObjectNotFound, PreconditionFailed, Store

RESERVED_S: Final = 3_600.0
RENEW_S: Final = 900.0


@dataclass(slots=True)
class Reservation:
    """One name, reserved by this process until it is released."""

    name: str
    key: str
    content: bytes
    etag: str


class _Reserved(msgspec.Struct, frozen=True):
    version: int
    name: str
    node_id: str
    process: str
    nonce: str
    renewals: int = 0


class Names:
    """The reservations of one process."""

    def __init__(self, store: Store, process: Process) -> None:
        self._store = store
        self._process = process
        self._held: dict[str, Reservation] = {}

    async def reserve(self, name: str) -> Reservation:
        """Raises `Conflict` while somebody else makes a snapshot of this (full, lower-cased) name."""
        key = f"{NAMES}{quoted(name)}.json"
        wanted = _Reserved(1, name, self._process.node_id, self._process.nonce, secrets.token_hex(8))
        content = msgspec.json.encode(wanted)
        try:
            etag = await self._store.put(key, content, if_absent=True)
        except PreconditionFailed:
            etag = await self._take_over(name, key, content)
        reservation = Reservation(name, key, content, etag)
        self._held[key] = reservation
        return reservation

    async def release(self, reservation: Reservation) -> None:
        """Let the name go. Idempotent; one that ran out and is another's by now stays."""
        self._held.pop(reservation.key, None)
        try:
            there = await self._store.get(reservation.key)
        except ObjectNotFound:
            return
        if there.content == reservation.content:
            await self._store.delete(reservation.key)

    async def renew(self) -> None:
        """Keep this process's reservations alive; call it every `RENEW_S`. One that was lost is let go."""
        for reservation in list(self._held.values()):
            there = msgspec.json.decode(reservation.content, type=_Reserved)
            content = msgspec.json.encode(msgspec.structs.replace(there, renewals=there.renewals + 1))
            try:
                etag = await self._store.put(reservation.key, content, if_match=reservation.etag)
            except PreconditionFailed:
                self._held.pop(reservation.key, None)
                continue
            reservation.content, reservation.etag = content, etag

    async def _take_over(self, name: str, key: str, content: bytes) -> str:
        try:
            there = await self._store.get(key)
        except ObjectNotFound:
            raise Conflict(f"a snapshot named '{name}' has just been made or given up; try again") from None
        if not await self._is_dead(key, there.content):
            raise Conflict(f"a snapshot named '{name}' is being made")
        try:
            return await self._store.put(key, content, if_match=there.etag)
        except PreconditionFailed:
            raise Conflict(f"a snapshot named '{name}' is being made") from None

    async def _is_dead(self, key: str, content: bytes) -> bool:
        try:
            holder = msgspec.json.decode(content, type=_Reserved)
        except msgspec.MsgspecError:
            holder = None
        if holder is not None and self._process.succeeds(holder.node_id, holder.process):
            return True
        now_s = await store_now(self._store)
        entry = await self._store.stat(key)
        return entry is not None and now_s - entry.modified_s > RESERVED_S


async def store_now(store: Store) -> float:
    """The time of an object that is made now: seconds by the store's own clock."""
    key = f"gc/clock-{secrets.token_hex(6)}.json"
    await store.put(key, b"{}")
    try:
        entry = await store.stat(key)
    finally:
        await store.delete(key)
    if entry is None:
        raise Conflict("the repository is being emptied")
    return entry.modified_s
