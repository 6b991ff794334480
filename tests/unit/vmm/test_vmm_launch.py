"""The call of aenv-launch, against scripts that stand in for it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable, VmmError, VmmGone, VmmTimeout
from agentenv.processes import start_time_ticks
from agentenv.vmm._launch import LOG_TAIL_BYTES, launch, log_tail


def launcher(folder: Path, script: str) -> Path:
    path = folder / "aenv-launch"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


async def test_the_launched_process_is_watched(tmp_path: Path) -> None:
    ticks = start_time_ticks(os.getpid())
    script = f'echo "$@" > {tmp_path}/arguments; echo \'{{"pid":{os.getpid()},"start_time_ticks":{ticks}}}\''
    process = await launch(launcher(tmp_path, script), tmp_path, "ns1", ["vmm", "-a", "b c"], 10)
    assert (process.pid, process.start_time_ticks) == (os.getpid(), ticks)
    process.close()
    arguments = (tmp_path / "arguments").read_text()
    assert f"--record {tmp_path}/vmm.json --log {tmp_path}/vmm.log" in arguments
    assert "--netns ns1" in arguments
    assert arguments.endswith("-- vmm -a b c\n")


async def test_without_a_namespace_none_is_asked_for(tmp_path: Path) -> None:
    script = f'echo "$@" > {tmp_path}/arguments; echo no such program >&2; exit 1'
    with pytest.raises(VmmError, match="vmm was not started: no such program"):
        await launch(launcher(tmp_path, script), tmp_path, "", ["vmm"], 10)
    assert "--netns" not in (tmp_path / "arguments").read_text()


async def test_a_program_that_ended_at_once_is_gone(tmp_path: Path) -> None:
    script = f'echo \'{{"pid":{os.getpid()},"start_time_ticks":1}}\''
    with pytest.raises(VmmGone):
        await launch(launcher(tmp_path, script), tmp_path, "", ["vmm"], 10)


@pytest.mark.parametrize("answer", ["", "nonsense", "{}", '{"pid":"x","start_time_ticks":1}', "[]"])
async def test_an_answer_that_is_no_record_is_an_error(tmp_path: Path, answer: str) -> None:
    with pytest.raises(VmmError, match="no process record"):
        await launch(launcher(tmp_path, f"echo '{answer}'"), tmp_path, "", ["vmm"], 10)


async def test_a_launcher_that_is_missing_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(HostUnsuitable, match="bin_dir"):
        await launch(tmp_path / "none", tmp_path, "", ["vmm"], 10)


async def test_a_launcher_that_hangs_is_a_timeout_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.vmm._launch.UNDO_TIMEOUT_S", 0.01)
    with pytest.raises(VmmTimeout):
        await launch(
            launcher(tmp_path, f"echo $$ > {tmp_path}/pid; exec cat /dev/zero >&2"), tmp_path, "", ["vmm"], 0.2
        )
    assert start_time_ticks(int((tmp_path / "pid").read_text())) is None


async def test_a_cancelled_launch_kills_what_the_launcher_still_starts(tmp_path: Path) -> None:
    """The launcher goes on after the cancellation, and its answer names a process that nobody wants any more."""
    os.mkfifo(tmp_path / "gate")
    script = f"""
    read line < {tmp_path}/gate
    setsid sleep 60 > /dev/null 2>&1 &
    echo "{{\\"pid\\":$!,\\"start_time_ticks\\":$(cut -d' ' -f22 /proc/$!/stat)}}" | tee {tmp_path}/answer
    """
    starting = asyncio.ensure_future(launch(launcher(tmp_path, script), tmp_path, "", ["vmm"], 10))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.to_thread((tmp_path / "gate").write_text, "go\n")
    with pytest.raises(asyncio.CancelledError):
        await starting
    pid = int((tmp_path / "answer").read_text().split(":")[1].split(",")[0])
    assert start_time_ticks(pid) is None


def test_the_log_tail_is_one_line(tmp_path: Path) -> None:
    assert log_tail(tmp_path) == ""
    (tmp_path / "vmm.log").write_text("x" * 5000 + "\nqemu: bad\nreally\n")
    tail = log_tail(tmp_path)
    assert tail.endswith("; qemu: bad; really")
    assert len(tail) <= 2 * LOG_TAIL_BYTES
