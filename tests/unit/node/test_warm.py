"""The warm pool by itself, over owners that only have a phase: who gets which clone, and in which instant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.unit.snapshots.test_catalog import MANIFEST

from agentenv.errors import OperationFailed
from agentenv.lifecycle import Event, Phase
from agentenv.model import SnapshotManifest
from agentenv.node import warm
from agentenv.node.owner import Owner
from agentenv.node.warm import WarmPool


class Clone:
    """What the pool knows of an owner."""

    def __init__(self) -> None:
        self.phase = Phase.WARMING
        self.warmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def become_warm(self) -> None:
        """As an owner does: the answer is given, and the phase changes before anybody hears of it."""
        self.warmed.set_result(None)
        self.phase = Phase.WARM

    def condemn(self, _reason: str, _detail: str) -> None:
        pass

    def ask(self, event: Event) -> asyncio.Future[Any]:
        assert event is Event.KILL
        self.phase = Phase.GONE
        if not self.warmed.done():
            self.warmed.set_exception(OperationFailed("killed"))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Nursery:
    """A pool of one clone per template, and the clones that it made."""

    def __init__(self) -> None:
        self.clones: list[Clone] = []
        self.pool = WarmPool(1, self._make, lambda owner, _: cast(Clone, owner).warmed, lambda: False, lambda: 0.0)

    async def _make(self, _manifest: SnapshotManifest) -> Owner:
        self.clones.append(Clone())
        return cast(Owner, self.clones[-1])

    async def clone(self, number: int) -> Clone:
        """The clone of that number, once it is being made."""
        async with asyncio.timeout(5):
            while len(self.clones) <= number:
                await asyncio.sleep(0)
        return self.clones[number]


@pytest.fixture
async def nursery(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nursery]:
    monkeypatch.setattr(warm, "REFILL_DELAY_S", 0.0)
    made = Nursery()
    yield made
    await made.pool.close()
    assert {clone.phase for clone in made.clones} <= {Phase.GONE, Phase.RUNNING}


async def test_who_asks_in_the_instant_in_which_a_clone_becomes_warm_gets_it(nursery: Nursery) -> None:
    assert nursery.pool.take(MANIFEST) is None
    clone = await nursery.clone(0)
    clone.become_warm()
    assert nursery.pool.take(MANIFEST) is cast(Owner, clone)
    clone.phase = Phase.RUNNING
    assert nursery.pool.take(MANIFEST) is None
    assert (await nursery.clone(1)).phase is Phase.WARMING


async def test_a_clone_that_is_not_warm_yet_is_not_given_and_not_lost(nursery: Nursery) -> None:
    nursery.pool.take(MANIFEST)
    clone = await nursery.clone(0)
    await asyncio.sleep(0)
    assert nursery.pool.take(MANIFEST) is None
    clone.become_warm()
    assert nursery.pool.take(MANIFEST) is cast(Owner, clone)
    clone.phase = Phase.RUNNING


async def test_a_clone_that_died_is_replaced(nursery: Nursery) -> None:
    nursery.pool.take(MANIFEST)
    dead = await nursery.clone(0)
    dead.become_warm()
    await asyncio.sleep(0)
    dead.phase = Phase.GONE
    assert nursery.pool.take(MANIFEST) is None
    (await nursery.clone(1)).become_warm()
    assert nursery.pool.take(MANIFEST) is cast(Owner, nursery.clones[1])
    nursery.clones[1].phase = Phase.RUNNING


async def test_a_snapshot_that_is_forgotten_ends_its_clone_at_once_and_delays_no_other(nursery: Nursery) -> None:
    nursery.pool.take(MANIFEST)
    clone = await nursery.clone(0)
    await asyncio.sleep(0)
    nursery.pool.forget(MANIFEST.snapshot_id)
    assert clone.phase is Phase.GONE
    # Were its end taken for a failure, the next one would come half a minute later.
    nursery.pool.take(MANIFEST)
    assert (await nursery.clone(1)).phase is Phase.WARMING
