"""Follows the repository: takes over snapshots that other nodes commit, and forgets those that they remove.

Owns when to look. Does not own names (`snapshots.Catalog`), nor the node's own commits: they enter the catalog at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agentenv.errors import AenvError, TemplateNotFound
from agentenv.model import SnapshotKind, SnapshotManifest
from agentenv.node.host import Host
from agentenv.snapshots.names import RENEW_S

log = logging.getLogger(__name__)


class Follower:
    """Keeps a catalog up to date. `forgotten` is told of snapshots that are gone."""

    def __init__(self, host: Host, every_s: float, forgotten: Callable[[str], None]) -> None:
        self._host = host
        self._every_s = every_s
        self._forgotten = forgotten
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look again and again from now on."""
        self._task = asyncio.create_task(self._follow(), name="follow the repository")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def find(self, reference: str) -> SnapshotManifest:
        """As `Catalog.resolve`, and looks into the repository before it says that there is none.

        Raises `TemplateNotFound`, `StoreUnavailable`.
        """
        try:
            return self._host.catalog.resolve(reference)
        except TemplateNotFound:
            await self.look()
            return self._host.catalog.resolve(reference)

    async def look(self) -> None:
        """Take over what changed. Raises `StoreUnavailable`."""
        catalog, repository = self._host.catalog, self._host.layers.repository
        await repository.refresh()
        stored, known = referable(repository.all()), referable(catalog.all())
        for snapshot_id in known.keys() - stored.keys():
            catalog.discard(snapshot_id)
            self._forgotten(snapshot_id)
        for snapshot_id in stored.keys() - known.keys():
            catalog.add(stored[snapshot_id])

    async def _follow(self) -> None:
        renewed_s = self._host.clock.monotonic()
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.look()
                if self._host.clock.monotonic() - renewed_s >= RENEW_S:
                    await self._host.layers.repository.renew()
                    renewed_s = self._host.clock.monotonic()
            except AenvError as error:
                log.warning("the repository could not be looked at: %s", error)


def referable(manifests: list[SnapshotManifest]) -> dict[str, SnapshotManifest]:
    """Those with which a sandbox can be created, by id. Pauses and forks are the business of their own node."""
    kinds = (SnapshotKind.TEMPLATE, SnapshotKind.SNAPSHOT)
    return {m.snapshot_id: m for m in manifests if m.kind in kinds}
