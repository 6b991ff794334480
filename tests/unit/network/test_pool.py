"""The pool's bookkeeping, over a host without a kernel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentenv.errors import AtCapacity, NetworkError, NodeStopping
from agentenv.model import NetworkPolicy
from agentenv.network import PoolSettings, SlotPool
from agentenv.network import pool as pool_module
from agentenv.network.fake import FakeSlotHost

OPEN = NetworkPolicy(allow_internet=True)
CLOSED = NetworkPolicy(allow_internet=False)


async def settle(pool: SlotPool) -> None:
    """Wait until the pool has nothing to do by itself."""
    while pool._tasks:
        await asyncio.wait(set(pool._tasks))


def settings(low: int, high: int, limit: int) -> PoolSettings:
    return PoolSettings(slot_pool_idle_count_min=low, slot_pool_idle_count_max=high, slot_count_max=limit)


@pytest.fixture
def host() -> FakeSlotHost:
    return FakeSlotHost()


@pytest.fixture
async def pool(host: FakeSlotHost) -> AsyncIterator[SlotPool]:
    """Two idle slots, at most three; four exist at most."""
    pool = SlotPool(host, settings(2, 3, 4))
    await pool.start()
    await settle(pool)
    yield pool
    await pool.close()


async def test_the_pool_fills_to_its_minimum_with_closed_slots(host: FakeSlotHost, pool: SlotPool) -> None:
    assert pool.counts()["idle"] == 2
    assert host.policies == {0: CLOSED, 1: CLOSED}


async def test_a_slot_has_its_policy_when_it_is_handed_out(host: FakeSlotHost, pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    assert host.policies[slot.index] == OPEN
    other = await pool.acquire(CLOSED)
    assert host.policies[other.index] == CLOSED
    assert (slot.netns, slot.address, slot.guest_mac) == ("aenv-fa4e00-0", "10.12.0.1", "02:ae:00:00:00:02")


async def test_the_pool_is_refilled_after_an_acquire(pool: SlotPool) -> None:
    await pool.acquire(OPEN)
    await settle(pool)
    assert pool.counts()["idle"] == 2


async def test_a_released_slot_is_reset_and_used_again(host: FakeSlotHost, pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    await pool.release(slot)
    assert host.policies[slot.index] == CLOSED
    assert pool.counts()["given"] == 0


async def test_more_idle_slots_than_the_maximum_are_removed(host: FakeSlotHost, pool: SlotPool) -> None:
    slots = [await pool.acquire(OPEN) for _ in range(4)]
    for slot in slots:
        await pool.release(slot)
    await settle(pool)
    assert pool.counts()["idle"] == len(host.policies) == 3


async def test_no_more_slots_than_the_limit_exist(pool: SlotPool) -> None:
    slots = [await pool.acquire(OPEN) for _ in range(4)]
    with pytest.raises(AtCapacity, match="all 4 network slots"):
        await pool.acquire(OPEN)
    await pool.release(slots[0])
    assert (await pool.acquire(OPEN)).index == slots[0].index


async def test_a_waiting_acquire_gets_the_slot_that_is_being_reset(host: FakeSlotHost, pool: SlotPool) -> None:
    slots = [await pool.acquire(OPEN) for _ in range(4)]
    reset = host.hold("reset")
    release = asyncio.create_task(pool.release(slots[2]))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(pool.acquire(CLOSED))
    await asyncio.sleep(0)
    reset.set()
    assert (await waiting).index == 2
    await release


async def test_a_cancelled_wait_loses_no_slot(
    host: FakeSlotHost, pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is handed over and the waiter is cancelled before it runs again."""
    slots = [await pool.acquire(OPEN) for _ in range(4)]
    host.hold("reset").set()
    release = asyncio.create_task(pool.release(slots[0]))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(pool.acquire(OPEN))
    await asyncio.sleep(0)
    hand_over = pool._offer

    def hand_over_and_cancel(index: int) -> None:
        monkeypatch.undo()
        hand_over(index)
        waiting.cancel()

    monkeypatch.setattr(pool, "_offer", hand_over_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await release
    assert list(pool._idle) == [0]


async def test_a_cancelled_acquire_leaves_no_open_slot_behind(host: FakeSlotHost, pool: SlotPool) -> None:
    """The thread that opens the slot cannot be stopped, so the reset must come after it."""
    opening = host.hold("set_policy")
    acquire = asyncio.create_task(pool.acquire(OPEN))
    await asyncio.to_thread(host.entered("set_policy").wait, 10)
    acquire.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquire
    opening.set()
    await settle(pool)
    assert host.policies[0] == CLOSED
    assert 0 in pool._idle


async def test_a_policy_that_cannot_be_set_fails_the_acquire(host: FakeSlotHost, pool: SlotPool) -> None:
    host.fail.add("set_policy")
    with pytest.raises(NetworkError, match="set_policy slot 0"):
        await pool.acquire(OPEN)
    await settle(pool)
    assert pool.counts()["given"] == 0
    assert 0 in pool._idle


async def test_a_slot_that_cannot_be_reset_is_removed(host: FakeSlotHost, pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    await settle(pool)
    host.fail.add("reset")
    await pool.release(slot)
    await settle(pool)
    assert ("remove", slot.index) in host.calls
    assert slot.index not in host.policies


async def test_a_slot_that_cannot_be_removed_is_never_used_again(host: FakeSlotHost, pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    host.fail |= {"reset", "remove"}
    await pool.release(slot)
    await settle(pool)
    host.fail.clear()
    assert pool.counts()["dirty"] == 1
    assert slot.index not in [(await pool.acquire(OPEN)).index for _ in range(3)]
    with pytest.raises(AtCapacity):
        await pool.acquire(OPEN)


async def test_a_slot_whose_tap_is_held_stays_with_its_owner(host: FakeSlotHost, pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    host.held_taps.add(slot.index)
    with pytest.raises(NetworkError, match="still holds tap0"):
        await pool.release(slot)
    host.held_taps.clear()
    await pool.release(slot)


async def test_a_slot_is_released_once(pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    await pool.release(slot)
    with pytest.raises(NetworkError, match="not in use"):
        await pool.release(slot)
    with pytest.raises(NetworkError, match="not in use"):
        await pool.set_policy(slot, CLOSED)


async def test_a_release_ends_although_its_caller_is_cancelled(host: FakeSlotHost, pool: SlotPool) -> None:
    slot = await pool.acquire(OPEN)
    reset = host.hold("reset")
    release = asyncio.create_task(pool.release(slot))
    await asyncio.sleep(0)
    release.cancel()
    with pytest.raises(asyncio.CancelledError):
        await release
    reset.set()
    await settle(pool)
    assert slot.index in pool._idle


async def test_a_slot_that_cannot_be_made_fails_who_waits_for_it(host: FakeSlotHost) -> None:
    pool = SlotPool(host, settings(0, 0, 4))
    await pool.start()
    host.fail.add("create")
    with pytest.raises(NetworkError, match="create slot 0"):
        await pool.acquire(OPEN)
    host.fail.clear()
    await pool.acquire(OPEN)
    await pool.close()


async def test_a_broken_host_is_not_asked_again_at_once(host: FakeSlotHost) -> None:
    host.fail.add("create")
    pool = SlotPool(host, settings(2, 2, 4))
    await pool.start()
    await settle(pool)
    assert [call for call in host.calls if call[0] == "create"] == [("create", 0), ("create", 1)]
    await pool.close()


async def test_adopt_keeps_what_is_in_use_and_cleans_the_rest(host: FakeSlotHost) -> None:
    host.policies = {0: OPEN, 1: OPEN, 2: OPEN}
    host.broken = {3}
    pool = SlotPool(host, settings(0, 8, 8))
    await pool.start()
    assert (await pool.acquire(CLOSED)).index == 4, "slots of the earlier server are not touched before adopt"
    kept = await pool.adopt({1, 3, 7})
    await settle(pool)
    assert list(kept) == [1]
    assert host.policies[1] == OPEN
    assert host.policies[0] == host.policies[2] == CLOSED
    assert ("remove", 3) in host.calls
    await pool.release(kept[1])
    assert sorted(pool._idle) == [0, 1, 2]
    await pool.close()


async def test_adopt_removes_a_slot_that_an_unknown_process_holds(host: FakeSlotHost) -> None:
    host.policies = {0: OPEN}
    host.held_taps = {0}
    pool = SlotPool(host, settings(0, 8, 8))
    await pool.start()
    assert await pool.adopt(set()) == {}
    await settle(pool)
    assert host.policies == {}
    await pool.close()


async def test_close_refuses_who_waits_and_leaves_the_slots(host: FakeSlotHost) -> None:
    pool = SlotPool(host, settings(0, 1, 1))
    await pool.start()
    making = host.hold("create")
    waiting = asyncio.create_task(pool.acquire(OPEN))
    await asyncio.sleep(0)
    closing = asyncio.create_task(pool.close())
    with pytest.raises(NodeStopping):
        await waiting
    making.set()
    await closing
    assert host.existing() == {0}
    assert not host.is_held_by_node
    with pytest.raises(NodeStopping):
        await pool.acquire(OPEN)


async def test_a_step_that_hangs_is_given_up_and_its_slot_is_not_reused(
    host: FakeSlotHost, pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STEP_DEADLINE_S", 0.02)
    hanging = host.hold("set_policy")
    with pytest.raises(NetworkError, match="not done within"):
        await pool.acquire(OPEN)
    await settle(pool)
    assert pool.counts()["dirty"] == 1
    hanging.set()
