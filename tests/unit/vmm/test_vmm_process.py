"""Processes by pid and start time."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest

from agentenv.errors import VmmGone
from agentenv.processes import start_time_ticks
from agentenv.vmm._process import WatchedProcess


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input to end."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield child
    child.kill()
    child.communicate()


def watched(child: subprocess.Popen[bytes]) -> WatchedProcess:
    ticks = start_time_ticks(child.pid)
    assert ticks is not None
    return WatchedProcess(child.pid, ticks)


async def test_the_end_is_told_to_every_waiter(child: subprocess.Popen[bytes]) -> None:
    process = watched(child)
    waiters = [asyncio.ensure_future(process.wait_exit()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    process.kill()
    await asyncio.to_thread(child.wait)
    assert {await waiter for waiter in waiters} <= {"killed by signal 9", "exited"}
    assert not process.alive()
    process.kill()
    process.close()


async def test_a_cancelled_waiter_does_not_disturb_the_others(child: subprocess.Popen[bytes]) -> None:
    process = watched(child)
    one, two = asyncio.ensure_future(process.wait_exit()), asyncio.ensure_future(process.wait_exit())
    await asyncio.sleep(0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    process.kill()
    child.wait()
    assert (await two).startswith(("killed", "exited"))
    process.close()


async def test_close_while_somebody_waits_leaves_the_wait_intact(child: subprocess.Popen[bytes]) -> None:
    process = watched(child)
    waiter = asyncio.ensure_future(process.wait_exit())
    await asyncio.sleep(0)
    process.close()
    process.kill()  # works without the pidfd, too
    child.wait()
    assert (await waiter).startswith(("killed", "exited"))
    assert await process.wait_exit() == await process.wait_exit()


async def test_another_process_with_the_same_pid_is_not_ours(child: subprocess.Popen[bytes]) -> None:
    ticks = start_time_ticks(child.pid)
    assert ticks is not None
    with pytest.raises(VmmGone, match="another process"):
        WatchedProcess(child.pid, ticks - 1)
    assert child.poll() is None


def test_a_zombie_counts_as_gone(child: subprocess.Popen[bytes]) -> None:
    process = watched(child)
    process.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive()
    assert start_time_ticks(child.pid) is None
    process.close()


def test_a_process_that_is_gone_cannot_be_opened() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    with pytest.raises(VmmGone):
        WatchedProcess(done.pid, 1)
