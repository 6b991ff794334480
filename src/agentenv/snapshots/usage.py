"""How much a repository holds, what of it is shared and what is garbage. A report, made without a lock."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Final

from agentenv.errors import StoreUnavailable
from agentenv.model import TierUsage
from agentenv.snapshots.blobs import (
    DAMAGED,
    HOLDS,
    IMAGES,
    LAYERS,
    MANIFESTS,
    NAMES,
    RECORDS,
    STATES,
    TRACES,
    id_of,
    ids_of,
    record_key,
)
from agentenv.snapshots.index import Index, gathered
from agentenv.snapshots.names import store_now
from agentenv.snapshots.stores.files import translated
from agentenv.snapshots.stores.interface import Store
from agentenv.snapshots.stores.posix import PosixStore
from agentenv.snapshots.sweep import CONTENT_FOLDERS, mark

# How long a store may take for one small request before it counts as away.
ANSWER_S_MAX: Final = 5.0

_FOLDERS: Final = (LAYERS, STATES, MANIFESTS, RECORDS, IMAGES, TRACES, NAMES, HOLDS, DAMAGED)


async def measure(store: Store, index: Index, location: str, answer_s_max: float = ANSWER_S_MAX) -> TierUsage:
    """Sizes of everything in a repository. Lists all of it, which takes seconds for a large one.

    Raises `StoreUnavailable` where the store says nothing at all for `answer_s_max` seconds.
    """
    await _expect_an_answer(store, location, answer_s_max)
    listed = await gathered(_FOLDERS, store.list)
    entries = [entry for folder in listed for entry in folder]
    marks = await mark(store, index, await store_now(store), strict=False)
    users = Counter[str]()
    for known in index.all():
        users.update(ids_of(known.snapshot))
        users.update([known.manifest] if known.manifest is not None else [])
    users.update(marks.by_images)
    content = [entry for entry in entries if entry.key.startswith(CONTENT_FOLDERS)]
    return TierUsage(
        location=location,
        size_bytes=sum(entry.stored_bytes for entry in entries),
        files=len(entries),
        shared_bytes=sum(entry.stored_bytes for entry in content if users[id_of(entry.key)] > 1),
        garbage_bytes=sum(entry.stored_bytes for entry in content if id_of(entry.key) not in marks.all()),
        free_bytes=await asyncio.to_thread(_free_bytes, store) if isinstance(store, PosixStore) else None,
    )


async def _expect_an_answer(store: Store, location: str, answer_s_max: float) -> None:
    """Who asks what there is waits, and wants to hear of an outage before a request has been repeated for a minute."""
    try:
        async with asyncio.timeout(answer_s_max):
            await store.stat(record_key("any"))
    except TimeoutError:
        raise StoreUnavailable(f"{location} has not answered within {answer_s_max:g} s") from None


def _free_bytes(store: PosixStore) -> int:
    with translated(f"cannot look at {store.root}"):
        found = os.statvfs(store.root)
    return found.f_bavail * found.f_frsize
