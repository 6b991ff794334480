"""The fake's own tools: what the conformance suite, which knows only the interface, cannot see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vmm_case import spec

from agentenv.errors import VmmError, VmmGone, VmmTimeout
from agentenv.vmm.fake import FakeDriver, FakeHost, Step


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(FakeHost())


async def test_a_planted_failure_hits_once_and_at_its_step(driver: FakeDriver) -> None:
    vmm = await driver.boot(spec())
    driver.host.fail(Step.STOP, VmmTimeout("planted"))
    assert await vmm.is_running()
    with pytest.raises(VmmTimeout, match="planted"):
        await vmm.stop()
    assert await vmm.is_running()
    await vmm.stop()
    assert not await vmm.is_running()


async def test_a_held_step_waits_until_the_test_lets_it_go(driver: FakeDriver) -> None:
    vmm = await driver.boot(spec())
    gate = driver.host.hold(Step.STOP)
    stopping = asyncio.ensure_future(vmm.stop())
    await driver.host.reached[Step.STOP].wait()
    assert vmm.process.running
    gate.set()
    await stopping
    assert not vmm.process.running


async def test_a_process_that_dies_while_a_call_is_held_ends_the_call(driver: FakeDriver) -> None:
    vmm = await driver.boot(spec())
    gate = driver.host.hold(Step.STOP)
    stopping = asyncio.ensure_future(vmm.stop())
    await driver.host.reached[Step.STOP].wait()
    driver.host.end(vmm.record.pid)
    gate.set()
    with pytest.raises(VmmGone):
        await stopping


async def test_a_failed_or_cancelled_start_leaves_no_process(driver: FakeDriver, tmp_path: Path) -> None:
    driver.host.fail(Step.BOOT, VmmError("planted"))
    with pytest.raises(VmmError, match="planted"):
        await driver.boot(spec())
    driver.host.hold(Step.BOOT)
    booting = asyncio.ensure_future(driver.boot(spec()))
    await driver.host.reached[Step.BOOT].wait()
    assert len(driver.host.processes) == 1, "a crash now would leave this one to recovery"
    booting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await booting
    assert not driver.host.processes


async def test_a_killed_process_whose_exit_is_held_stays_until_released(driver: FakeDriver) -> None:
    vmm = await driver.boot(spec())
    driver.host.hold(Step.EXIT)
    vmm.kill()
    waiting = asyncio.ensure_future(vmm.wait_exit())
    await driver.host.reached[Step.EXIT].wait()
    assert not waiting.done()
    with pytest.raises(VmmGone):
        await vmm.stop()
    driver.host.release_exits()
    assert await waiting == "killed by signal 9"
    assert not driver.host.processes


async def test_a_guest_that_powers_off_is_seen_by_whoever_waits(driver: FakeDriver) -> None:
    vmm = await driver.boot(spec())
    waiting = asyncio.ensure_future(vmm.wait_exit())
    driver.host.end(vmm.record.pid)
    assert "guest-shutdown" in await waiting
