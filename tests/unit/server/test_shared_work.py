"""Work that is done once for several callers."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.errors import ImageError
from agentenv.model import Progress, Report
from agentenv.server.shared_work import SharedWork


def unheard(progress: Progress) -> None:
    return


async def test_callers_of_one_key_share_one_job_and_its_progress() -> None:
    shared: SharedWork[int] = SharedWork()
    gate, runs = asyncio.Event(), 0
    heard: list[str] = []

    async def work(report: Report) -> int:
        nonlocal runs
        runs += 1
        report(Progress("first"))
        await gate.wait()
        report(Progress("second"))
        return 7

    one = asyncio.create_task(shared.run("k", unheard, work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    two = asyncio.create_task(shared.run("k", lambda p: heard.append(p.text), work))
    await asyncio.sleep(0)
    gate.set()
    assert (await one, await two, runs) == (7, 7, 1)
    assert heard == ["first", "second"]


async def test_a_caller_that_leaves_does_not_end_the_others_job_and_the_last_one_does() -> None:
    shared: SharedWork[None] = SharedWork()
    ended: list[str] = []

    async def work(report: Report) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    one = asyncio.create_task(shared.run("k", unheard, work))
    two = asyncio.create_task(shared.run("k", unheard, work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert ended == []
    two.cancel()
    await asyncio.gather(two, return_exceptions=True)
    assert ended == ["cancelled"]


async def test_a_failure_is_everybodys_and_the_next_caller_tries_again() -> None:
    shared: SharedWork[int] = SharedWork()

    async def fail(report: Report) -> int:
        await asyncio.sleep(0)
        raise ImageError("no")

    async def succeed(report: Report) -> int:
        return 1

    outcomes = await asyncio.gather(
        shared.run("k", unheard, fail), shared.run("k", unheard, fail), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [ImageError, ImageError]
    assert await shared.run("k", unheard, succeed) == 1


async def test_closing_ends_everything() -> None:
    shared: SharedWork[None] = SharedWork()

    async def work(report: Report) -> None:
        await asyncio.Event().wait()

    caller = asyncio.create_task(shared.run("k", unheard, work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
