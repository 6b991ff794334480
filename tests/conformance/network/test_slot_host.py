"""What every `SlotHost` promises, shown for the fake and for the real one, and for the pool over each."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from slot_world import World, tap_descriptor

from agentenv.errors import NetworkError
from agentenv.model import NetworkPolicy
from agentenv.network import PoolSettings, SlotHost, SlotPool, _namespace
from agentenv.network.fake import FakeSlotHost

OPEN, CLOSED = NetworkPolicy(True), NetworkPolicy(False)


@dataclass
class Case:
    """A host under test, how to call it, and how to play a VMM that holds a tap."""

    host: SlotHost
    run: Callable[[Callable[[], Any]], Any]
    hold_tap: Callable[[int], Callable[[], None]]


def _fake_case() -> Case:
    host = FakeSlotHost()
    host.prepare()

    def hold(index: int) -> Callable[[], None]:
        host.held_taps.add(index)
        return host.held_taps.clear

    return Case(host, lambda work: work(), hold)


def _real_case(world: World) -> Case:
    def hold(index: int) -> Callable[[], None]:
        slot = world.host.slot(index)
        descriptor = _namespace.run_in(slot.netns, lambda: tap_descriptor(slot.tap))
        return lambda: os.close(descriptor)

    return Case(world.host, world.on_host, hold)


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.host)])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "fake":
        yield _fake_case()
        return
    case = _real_case(request.getfixturevalue("world"))
    case.run(case.host.prepare)
    yield case


@pytest.fixture
def index(case: Case) -> Iterator[int]:
    """A slot that exists for one test."""
    case.run(lambda: case.host.create(5))
    yield 5
    case.run(lambda: case.host.remove(5))


def test_a_made_slot_is_found_and_whole(case: Case, index: int) -> None:
    assert case.run(case.host.existing) == {index}
    assert case.run(lambda: case.host.is_whole(index))


def test_a_slot_is_made_once(case: Case, index: int) -> None:
    with pytest.raises(NetworkError, match=r"slot|namespace"):
        case.run(lambda: case.host.create(index))


def test_policies_may_be_set_again_and_again(case: Case, index: int) -> None:
    for policy in (OPEN, OPEN, CLOSED, CLOSED, OPEN):
        case.run(lambda policy=policy: case.host.set_policy(index, policy))


def test_a_slot_whose_tap_is_held_is_not_reset(case: Case, index: int) -> None:
    let_go = case.hold_tap(index)
    try:
        assert case.run(lambda: case.host.reset(index)) is False
    finally:
        let_go()
    assert case.run(lambda: case.host.reset(index)) is True


def test_removing_is_repeatable_and_leaves_nothing(case: Case) -> None:
    case.run(lambda: case.host.create(6))
    for _ in range(2):
        case.run(lambda: case.host.remove(6))
    assert case.run(case.host.existing) == set()
    assert not case.run(lambda: case.host.is_whole(6))


def test_work_on_a_slot_that_is_not_there_is_a_network_error(case: Case) -> None:
    for work in (lambda: case.host.set_policy(9, OPEN), lambda: case.host.reset(9)):
        with pytest.raises(NetworkError, match="slot 9"):
            case.run(work)


class _Prepared:
    """The same host, already prepared, for a pool: preparing twice would find the node's lock taken."""

    def __init__(self, host: SlotHost) -> None:
        self._host = host

    def prepare(self) -> None:
        pass

    def release(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


async def _pool_story(host: SlotHost) -> None:
    """Acquire, change, release, restart, adopt."""
    settings = PoolSettings(slot_pool_idle_count_min=2, slot_pool_idle_count_max=3, slot_count_max=8)
    pool = SlotPool(host, settings)
    await pool.start()
    await pool.adopt(set())
    slots = [await pool.acquire(OPEN), await pool.acquire(CLOSED), await pool.acquire(OPEN)]
    assert len({slot.address for slot in slots}) == 3
    await pool.set_policy(slots[0], CLOSED)
    await pool.release(slots[1])
    await pool.close()

    again = SlotPool(host, settings)
    await again.start()
    kept = await again.adopt({slots[0].index, slots[2].index, 7})
    assert list(kept.values()) == [slots[0], slots[2]]
    for slot in kept.values():
        await again.release(slot)
    await again.close()
    leftover = SlotPool(host, PoolSettings(slot_pool_idle_count_min=0, slot_pool_idle_count_max=0, slot_count_max=8))
    await leftover.start()
    await leftover.adopt(set())
    await leftover.close()
    assert host.existing() == set()


def test_a_pool_gives_takes_restarts_and_adopts(case: Case) -> None:
    host: Any = _Prepared(case.host)
    case.run(lambda: asyncio.run(_pool_story(host)))


@pytest.mark.host
def test_acquire_takes_under_2_ms_and_a_new_slot_under_50(world: World, case: Case) -> None:
    """The fastest of 20, since tests share the machine; what they guard against is a wait of 10 ms for the kernel.

    The fake runs along and shows what the pool itself costs.
    """

    async def measure() -> tuple[list[float], list[float]]:
        pool = SlotPool(host, PoolSettings(slot_pool_idle_count_min=4, slot_pool_idle_count_max=8, slot_count_max=8))
        await pool.start()
        acquired, made = [], []
        for number in range(20):
            start = time.perf_counter()
            await asyncio.to_thread(case.host.create, 20 + number)
            made.append(time.perf_counter() - start)
            await asyncio.to_thread(case.host.remove, 20 + number)
            start = time.perf_counter()
            slot = await pool.acquire(OPEN)
            acquired.append(time.perf_counter() - start)
            await pool.release(slot)
        await pool.close()
        return acquired, made

    host: Any = _Prepared(case.host)
    acquired, made = case.run(lambda: asyncio.run(measure()))
    for left in case.run(case.host.existing):
        case.run(lambda left=left: case.host.remove(left))
    acquire_s, make_s = min(acquired), min(made)
    print(f"acquire {acquire_s * 1e3:.2f} ms, new slot {make_s * 1e3:.1f} ms")
    assert acquire_s < 0.002
    assert make_s < 0.050
