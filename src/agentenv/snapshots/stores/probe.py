"""Whether a store does what a repository relies on: asked once, at the start of a server.

There are services that speak S3 and ignore the conditions of a put. On one of those two nodes would both hold a lock,
and a sweep would take what another node is committing; so such a store is refused.
"""

from __future__ import annotations

import secrets

from agentenv.errors import StoreRefused
from agentenv.snapshots.stores.interface import PreconditionFailed, Store


async def probe(store: Store, location: str) -> None:
    """Write, list, replace and delete one object. Raises `StoreRefused` saying what the store at `location` lacks."""
    key = f"gc/probe-{secrets.token_hex(8)}.json"
    first = await store.put(key, b"1", if_absent=True)
    try:
        if await _succeeds(store, key, b"2", if_absent=True):
            raise StoreRefused(f"{location} creates an object that is there already: it ignores If-None-Match")
        await store.put(key, b"3", if_match=first)
        if await _succeeds(store, key, b"4", if_match=first):
            raise StoreRefused(f"{location} replaces an object that has changed: it ignores If-Match")
        if key not in {entry.key for entry in await store.list("gc/")}:
            raise StoreRefused(f"{location} does not list what was put just now")
    finally:
        await store.delete(key)


async def _succeeds(
    store: Store, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
) -> bool:
    try:
        await store.put(key, content, if_absent=if_absent, if_match=if_match)
    except PreconditionFailed:
        return False
    return True
