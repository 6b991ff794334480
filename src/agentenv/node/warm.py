"""Warm clones: a few restored sandboxes per wanted template, which have answered once and wait halted.

Owns how many there are and which one a create gets. Does not own how one is made or personalised (`starting`). A pool
never hands out anything stale: it is keyed by the snapshot's id, whose content never changes, and what makes a clone
somebody's (clock, token, environment, policy) is set when it is handed out. Clones do not survive a restart of the
server; they are cheap to make and hold nothing of anybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from agentenv.errors import AenvError
from agentenv.lifecycle import POOLED, Event, Phase
from agentenv.model import SnapshotManifest
from agentenv.node.owner import Owner

log = logging.getLogger(__name__)

# Templates that keep clones: those asked for last.
HOT_TEMPLATES_MAX: Final = 4
# A template that nobody asked for this long gives its clones back.
IDLE_S_MAX: Final = 600.0
# Clones are made after the burst of creates that asks for them, not beside it.
REFILL_DELAY_S: Final = 0.05
# After a failed warm-up (no memory, no slots) the pool waits before it tries again.
RETRY_S: Final = 30.0


class WarmPool:
    """Clones by snapshot id. `make` starts one (it is in phase *warming* and becomes *warm* by itself)."""

    def __init__(
        self,
        per_template: int,
        make: Callable[[SnapshotManifest], Awaitable[Owner]],
        warmed: Callable[[Owner, SnapshotManifest], asyncio.Future[None]],
        is_busy: Callable[[], bool],
        now_s: Callable[[], float],
    ) -> None:
        self._per_template = per_template
        self._make = make
        self._warmed = warmed
        self._is_busy = is_busy
        self._now_s = now_s
        self._idle: OrderedDict[str, list[Owner]] = OrderedDict()
        self._asked_at: dict[str, float] = {}
        self._manifests: dict[str, SnapshotManifest] = {}
        self._refill: asyncio.Task[None] | None = None

    def take(self, manifest: SnapshotManifest) -> Owner | None:
        """A warm clone of the snapshot, which is the caller's now; None when there is none. Notes the demand."""
        if self._per_template == 0:
            return None
        key = manifest.snapshot_id
        self._asked_at[key] = self._now_s()
        self._manifests[key] = manifest
        self._idle.setdefault(key, [])
        self._idle.move_to_end(key)
        self._refill_soon()
        clones = self._alive(key)
        taken = next((owner for owner in clones if owner.phase is Phase.WARM), None)
        if taken is not None:
            clones.remove(taken)
        return taken

    def forget(self, snapshot_id: str) -> None:
        """The snapshot was deleted: end its clones."""
        self._asked_at.pop(snapshot_id, None)
        self._manifests.pop(snapshot_id, None)
        for owner in self._idle.pop(snapshot_id, ()):
            _discard(owner)

    async def close(self) -> None:
        """End all clones; the server stops."""
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        ends = [_discard(owner) for clones in self._idle.values() for owner in clones]
        self._idle.clear()
        await asyncio.gather(*ends, return_exceptions=True)

    def _refill_soon(self) -> None:
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._keep_filled(), name="refill the warm pool")

    async def _keep_filled(self) -> None:
        """Fill while there is demand; ends (and is started again by `take`) when all templates have gone cold."""
        while self._asked_at:
            await asyncio.sleep(REFILL_DELAY_S)
            self._drop_cold()
            wanted = self._next_wanted()
            if wanted is None:
                await asyncio.sleep(1.0)
            elif not self._is_busy():
                await self._warm_one(wanted)

    async def _warm_one(self, manifest: SnapshotManifest) -> None:
        clones = self._idle[manifest.snapshot_id]
        try:
            owner = await self._make(manifest)
            warmed = self._warmed(owner, manifest)
            if self._is_forgotten(manifest, clones):
                _discard(owner)
            else:
                # From now on, so that whoever asks in the instant in which it becomes warm gets it.
                clones.append(owner)
            await warmed
        except AenvError as error:
            if self._is_forgotten(manifest, clones):
                # The clone was ended with the others.
                return
            log.warning("no warm clone of %s could be made: %s", manifest.snapshot_id, error)
            await asyncio.sleep(RETRY_S)

    def _is_forgotten(self, manifest: SnapshotManifest, clones: list[Owner]) -> bool:
        return self._idle.get(manifest.snapshot_id) is not clones

    def _next_wanted(self) -> SnapshotManifest | None:
        """The template asked for last that lacks a clone."""
        for key in reversed(self._idle):
            if len(self._alive(key)) < self._per_template and key in self._manifests:
                return self._manifests[key]
        return None

    def _alive(self, key: str) -> list[Owner]:
        """The clones that are warm or becoming so, oldest first; those that died meanwhile are forgotten."""
        clones = self._idle[key]
        clones[:] = [owner for owner in clones if owner.phase in POOLED]
        return clones

    def _drop_cold(self) -> None:
        now = self._now_s()
        cold = [key for key, asked in self._asked_at.items() if now - asked > IDLE_S_MAX]
        crowded = list(self._idle)[: max(0, len(self._idle) - HOT_TEMPLATES_MAX)]
        for key in {*cold, *crowded}:
            self.forget(key)


def _discard(owner: Owner) -> asyncio.Future[None]:
    owner.condemn("deleted", "a warm clone that nobody needed")
    return owner.ask(Event.KILL)
