"""What this node needs although no record names it: blobs of running sandboxes, and of commits that are under way.

One object per node, `holds/<node>.json`. It grows before `hold` returns; it shrinks at the next growth or `renew`,
because a hold that is there too long costs disk space for a while and one that is missing costs data. The holds of this
node's former process stay in it until `settle` says that everything which the node still needs is held anew.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from agentenv.snapshots.blobs import HOLDS, quoted
from agentenv.snapshots.gclock import Process, Timing, wait_for_sweep
from agentenv.snapshots.stores.interface import ObjectNotFound, Store

# A hold that its node did not renew for so long belongs to a node that is no more. By the store's clock.
HOLD_S_MAX: Final = 7 * 86_400.0
RENEW_S: Final = 3_600.0
# Ids as they stand in holds and image records. Reading them so keeps what a damaged or newer object names.
_IDS: Final = re.compile(rb"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{24})(?![0-9a-f])")


def ids_in(content: bytes) -> set[str]:
    """Every id of a layer, state or manifest that some object mentions, whatever its form is."""
    return {found.decode() for found in _IDS.findall(content)}


class Holds:
    """Counted holds of one process. One event loop."""

    def __init__(self, store: Store, process: Process, timing: Timing) -> None:
        self._store = store
        self._process = process
        self._timing = timing
        self._key = f"{HOLDS}{quoted(process.node_id)}.json"
        self._counts: Counter[str] = Counter()
        self._inherited: set[str] = set()
        # What is surely in the object, and written before any sweep that may still delete.
        self._settled: set[str] = set()
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Take over what the former process held. Call it once, before anything else."""
        try:
            self._inherited = ids_in((await self._store.get(self._key)).content)
        except ObjectNotFound:
            self._inherited = set()

    async def hold(self, ids: Iterable[str]) -> None:
        """Keep every sweeper away from these until as many `release`s.

        Whether a blob exists must be asked after this returned. When it raises, or is cancelled, nothing is held.
        """
        wanted = set(ids)
        self._counts.update(wanted)
        try:
            if wanted <= self._settled:
                return
            async with self._writing:
                if not wanted <= self._settled:
                    written = await self._write()
                    await wait_for_sweep(self._store, self._process, self._timing)
                    self._settled = written
        except BaseException:
            self.release(wanted)
            raise

    def release(self, ids: Iterable[str]) -> None:
        """Undo one `hold` of each."""
        self._counts.subtract(set(ids))
        self._counts = +self._counts

    def held(self) -> set[str]:
        """What is held now, by this process or as an inheritance."""
        return {*self._counts, *self._inherited}

    def settle(self) -> None:
        """Everything that the node needs is held by this process: let go what only the former one held."""
        self._inherited = set()

    async def renew(self) -> None:
        """Write the object again, so that it shrinks and nobody takes this node for dead. Every `RENEW_S`."""
        async with self._writing:
            await self._write()

    async def _write(self) -> set[str]:
        content = self.held()
        # Whoever asks from now on for something that is no longer in it must wait for its own write.
        self._settled &= content
        body = {"version": 1, "node_id": self._process.node_id, "ids": sorted(content)}
        await self._store.put(self._key, msgspec.json.encode(body))
        return content
