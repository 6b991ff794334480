"""Admission: what never fits, what waits, what is refused."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.errors import AtCapacity, InvalidRequest
from agentenv.model import Resources
from agentenv.node.admission import Admission, Limits

SMALL = Resources(1, 512, 1024)


def admission(*, concurrency: int = 1, queue: int = 1, wait_s: float = 30.0, available_mib: int = 8000) -> Admission:
    limits = Limits(
        live_count_max=2,
        start_concurrency_max=concurrency,
        start_queue_length_max=queue,
        start_wait_s_max=wait_s,
        memory_total_mib=8192,
        memory_reserve_mib=1024,
        cpu_count=2,
    )
    return Admission(limits, lambda: available_mib)


async def test_a_machine_larger_than_the_node_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="7168 MiB"):
        admission().check_fits(Resources(1, 8000, 1024))


async def test_starts_wait_for_their_turn_and_a_full_queue_refuses() -> None:
    gate, order = asyncio.Event(), []
    admitted = admission()

    async def start(name: str) -> None:
        async with admitted.start(SMALL):
            order.append(name)
            await gate.wait()

    first = asyncio.create_task(start("first"))
    await asyncio.sleep(0)
    second = asyncio.create_task(start("second"))
    await asyncio.sleep(0)
    with pytest.raises(AtCapacity):
        await start("third")
    assert order == ["first"]
    gate.set()
    await asyncio.gather(first, second)
    assert order == ["first", "second"]


async def test_a_wait_has_a_deadline() -> None:
    admitted = admission(wait_s=0.01)
    async with admitted.start(SMALL):
        with pytest.raises(AtCapacity, match=r"0\.01 s"):
            async with admitted.start(SMALL):
                pass
    async with admitted.start(SMALL):
        pass


async def test_a_cancelled_wait_gives_its_place_back() -> None:
    admitted = admission()
    async with admitted.start(SMALL):
        waiting = asyncio.create_task(admitted.start(SMALL).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with admitted.start(SMALL):
        pass


async def test_live_count_and_memory_are_limits() -> None:
    crowded = admission()
    crowded.live_count = lambda: 3
    with pytest.raises(AtCapacity, match="maximum of 2"):
        async with crowded.start(SMALL):
            pass
    with pytest.raises(AtCapacity, match="100 MiB"):
        async with admission(available_mib=100).start(SMALL):
            pass
