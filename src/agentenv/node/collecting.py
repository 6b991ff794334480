"""Collection of what no sandbox and no work in progress needs: local layers, holds, and blobs of deleted snapshots.

What committed snapshots need is the repository's business (`snapshots`): blobs go only when no record of any node names
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from agentenv.errors import AenvError
from agentenv.model import MemoryStack
from agentenv.node.host import Host
from agentenv.node.record import SandboxRecord

log = logging.getLogger(__name__)

# Deletions come in bursts (sixteen forks end together); one sweep serves them all.
DELAY_S: Final = 2.0
# A sweep of the repository lists all that there is, which a bucket charges for.
REPOSITORY_S: Final = 30.0


class Collector:
    """Sweeps soon after it was asked to, one sweep at a time."""

    def __init__(self, host: Host, records: Callable[[], Iterable[SandboxRecord]]) -> None:
        self._host = host
        self._records = records
        self._task: asyncio.Task[None] | None = None
        self._asked_again = False
        self._swept_s = float("-inf")
        self._later: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Ask for a sweep; cheap, any number of times."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._sweep_later(), name="collect layers")
        else:
            self._asked_again = True

    async def stop(self) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweep(self) -> tuple[int, int]:
        """Delete unneeded local layers now; returns how many files and bytes went."""
        layers = self._host.layers
        candidates = await asyncio.to_thread(layers.staging.stored_ids)
        idle = self._unneeded_images(self.needed() | self._committed())
        await self._host.images.forget({stack.image_id for stack in idle})
        needed = self.needed() | self._needed_by(self._host.images.stacks_in_use())
        layers.let_go(needed)
        removed = await asyncio.to_thread(layers.staging.collect, candidates, needed)
        layers.forget_published(candidates - needed)
        return removed

    async def _sweep_later(self) -> None:
        while True:
            self._asked_again = False
            await asyncio.sleep(DELAY_S)
            try:
                files, _ = await self.sweep()
                await self._sweep_repository()
            except AenvError as error:
                log.warning("layers could not be collected: %s", error)
            else:
                log.debug("collected %d local files", files)
            if not self._asked_again:
                return

    async def _sweep_repository(self) -> None:
        """Collect what removed records named, not more often than `REPOSITORY_S`: it lists all that there is."""
        layers, now_s = self._host.layers, self._host.clock.monotonic()
        wait_s = self._swept_s + REPOSITORY_S - now_s
        if wait_s <= 0:
            self._swept_s = now_s
            await layers.sweep()
            wait_s = max(REPOSITORY_S, layers.grace_s)
        if layers.is_sweep_due and self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._due)

    def _due(self) -> None:
        self._later = None
        self.soon()

    def needed(self) -> set[str]:
        """Asked for after the candidates were listed, and without an await: it is one consistent view."""
        needed = self._host.layers.reservations
        for record in self._records():
            needed |= record.layer_ids()
        return needed

    def _committed(self) -> set[str]:
        """Tops of the memory images that a create may ask for next: they stay exported, and their pages cached."""
        return {m.memory.layers[-1] for m in self._host.catalog.all() if m.memory.layers}

    def _unneeded_images(self, needed: set[str]) -> list[MemoryStack]:
        """Idle exports whose top layer no snapshot or sandbox names: the image of an ended fork or an old pause."""
        return [s for s in self._host.images.stacks_in_use() if s.layers and s.layers[-1] not in needed]

    @staticmethod
    def _needed_by(stacks: Iterable[MemoryStack]) -> set[str]:
        return {layer for stack in stacks for layer in stack.layers}
