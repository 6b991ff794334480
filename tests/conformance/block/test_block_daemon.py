"""`BlockDaemon` with real processes: start, find again, replace, stop, clean up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from block_bench import read, write

from agentenv.block import BlockClient, BlockDaemon
from agentenv.errors import BlockError, HostUnsuitable

pytestmark = pytest.mark.host

MIB = 1 << 20


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


async def test_ensure_starts_once_and_finds_again(daemon: BlockDaemon) -> None:
    """A server that restarts finds the pair that it started before."""
    first = await daemon.ensure()
    assert await daemon.ensure() == first


async def test_the_client_goes_on_over_kills_of_either(daemon: BlockDaemon) -> None:
    """Calls and guests' files need nothing but patience of milliseconds."""
    await daemon.ensure()
    client = BlockClient(daemon.socket)
    try:
        path = await client.export_disk("d", MIB, [], daemon.disk_mount.parent / "upper")
        descriptor = os.open(path, os.O_RDWR)
        try:
            for round_number in range(3):
                hello = await client.hello()
                os.kill(hello.pid if round_number % 2 else hello.keeper_pid, signal.SIGKILL)
                data = bytes([round_number]) * 512
                await asyncio.to_thread(os.pwrite, descriptor, data, 0)
                assert await asyncio.to_thread(os.pread, descriptor, 512, 0) == data
                assert [export.name for export in await client.exports()] == ["d"]
        finally:
            os.close(descriptor)
    finally:
        await client.close()


async def test_stop_ends_both_and_unmounts_and_is_idempotent(daemon: BlockDaemon) -> None:
    """Exports are there again after the next start, under the same inodes."""
    hello = await daemon.ensure()
    client = BlockClient(daemon.socket)
    upper = daemon.disk_mount.parent / "upper"
    write(await client.export_disk("d", MIB, [], upper), 0, b"x" * 512)
    before = await client.exports()
    await client.close()
    await daemon.stop()
    await daemon.stop()
    assert not is_alive(hello.pid)
    assert not is_alive(hello.keeper_pid)
    assert not os.path.ismount(daemon.disk_mount)
    await daemon.ensure()
    assert await client.exports() == before
    assert read(daemon.disk_mount / "d", 0, 512) == b"x" * 512
    await client.close()


async def test_stop_cleans_up_after_a_pair_that_was_killed(daemon: BlockDaemon) -> None:
    """Dead mounts do not stay."""
    hello = await daemon.ensure()
    os.kill(hello.keeper_pid, signal.SIGSTOP)
    os.kill(hello.pid, signal.SIGKILL)
    os.kill(hello.keeper_pid, signal.SIGKILL)
    await daemon.stop()
    assert str(daemon.disk_mount) not in Path("/proc/mounts").read_text()


async def test_a_missing_binary_is_named(tmp_path: Path) -> None:
    """And so is what to do about it."""
    with pytest.raises(HostUnsuitable, match="aenv-launch"):
        await BlockDaemon(bin_dir=tmp_path, run_dir=tmp_path / "r", state_dir=tmp_path / "s").ensure()


async def test_a_daemon_that_ends_at_once_says_why(daemon: BlockDaemon) -> None:
    """Its last words are in the error, and nobody waits for the deadline."""
    daemon.disk_mount.parent.mkdir(parents=True)
    daemon.disk_mount.write_text("a file where the mount point should be")
    with pytest.raises(HostUnsuitable, match="disks"):
        await daemon.ensure()


async def test_a_lost_capture_is_told_as_such(daemon: BlockDaemon) -> None:
    """The job died with its blockd: the next one does not know it."""
    await daemon.ensure()
    client = BlockClient(daemon.socket)
    try:
        hello = await client.hello()
        os.kill(hello.pid, signal.SIGKILL)
        with pytest.raises(BlockError) as caught:
            await client.capture_finish("j")
        assert caught.value.kind in ("not_found", "outcome_unknown")
    finally:
        await client.close()
