"""Verifying and repairing one node's repository: `checking` finds, `repairing` mends, this joins them.

Owns how a blob that is damaged is made again: from the local layer or device state of the same content, if staging
still has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from agentenv.model import Progress, Report, VerifyReport
from agentenv.snapshots.blobs import LAYERS, STATES, Places, id_of, layer_key, state_key
from agentenv.snapshots.checking import LayerChecker, Verifier, images_of, with_images
from agentenv.snapshots.index import Index
from agentenv.snapshots.publishing import Digester
from agentenv.snapshots.repairing import Repairer, find_local
from agentenv.snapshots.staging import Staging
from agentenv.snapshots.stores.interface import Store

# Publishes a local layer or (True) device state; returns the digest that it has now.
PublishAgain = Callable[[Path, bool], Awaitable[str]]


class Care:
    """Reads everything, and mends what it can. One event loop."""

    def __init__(self, index: Index, store: Store, places: Places, checker: LayerChecker) -> None:
        """`index` is what the process knows; a verification reads everything afresh beside it."""
        self._index = index
        self._store = store
        self._places = places
        self._checker = checker
        self._again: tuple[Staging, Digester, PublishAgain] | None = None

    def republish_with(self, staging: Staging, digester: Digester | None, publish: PublishAgain) -> None:
        """How lost blobs are made again; without a digester they are not."""
        self._again = None if digester is None else (staging, digester, publish)

    async def verify(self, report: Report) -> VerifyReport:
        """What is damaged, and what depends on it. Raises what the store raises."""
        return (await self._verified(report))[1]

    async def repair(self, report: Report) -> VerifyReport:
        """The same, with what is whole again marked so."""
        verifier, found = await self._verified(report)
        report(Progress("repairing"))
        repaired = await Repairer(self._store, self._index, self._republish).repair(verifier.found)
        await self._index.refresh()
        damages = [
            replace(damage, repaired=True, detail=f"{damage.detail}; {repaired[damage.item]}")
            if damage.item in repaired
            else damage
            for damage in found.damages
        ]
        return replace(found, damages=tuple(damages))

    async def _verified(self, report: Report) -> tuple[Verifier, VerifyReport]:
        verifier = Verifier(self._store, self._index.fresh(), self._checker, self._places, report)
        found = await verifier.run()
        images = await images_of(self._store)
        stored = {id_of(entry.key) for folder in (LAYERS, STATES) for entry in await self._store.list(folder)}
        return verifier, with_images(found, images, stored)

    async def _republish(self, digest: str) -> bool:
        """Whether a blob could be made again."""
        blob = self._index.blob(digest)
        if blob is None or self._again is None:
            return False
        staging, digester, publish = self._again
        is_state = await self._store.stat(layer_key(digest)) is None and any(
            known.snapshot.device_state == digest for known in self._index.all()
        )
        local = await find_local(staging, digester, blob.plain_digest, is_state=is_state)
        if local is None:
            return False
        await self._store.delete(state_key(digest) if is_state else layer_key(digest))
        return await publish(local, is_state) == digest
