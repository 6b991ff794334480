"""Starts a VMM through aenv-launch, so that it is nobody's child here and outlives the server.

Owns the call and the reading of its answer. The launcher's own record file is written before the program runs, and
lies in the VMM's runtime directory: a server that died between the start and the caller's own record finds the VMM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import HostUnsuitable, VmmError, VmmTimeout
from agentenv.vmm._process import WatchedProcess, readable

PROCESS_RECORD = "vmm.json"
VMM_LOG = "vmm.log"
LOG_TAIL_BYTES = 2000
# How long the clean-up of a cancelled start waits, for the launcher (3 ms) and for the killed VMM each.
UNDO_TIMEOUT_S = 5.0
# Where memory runs out on the host, a VMM dies before the daemons that all sandboxes need.
OOM_SCORE_ADJ = 500


async def launch(
    launcher: Path, runtime_dir: Path, netns: str, command: Sequence[str], timeout_s: float
) -> WatchedProcess:
    """Start `command` in the namespace; "" means this one.

    Raises `VmmError` with the launcher's reason, `VmmTimeout`, or `VmmGone` when the program ended at once. When it is
    cancelled or times out, whatever was started is killed.
    """
    record = runtime_dir / PROCESS_RECORD
    arguments = [str(launcher), "--record", str(record), "--log", str(runtime_dir / VMM_LOG)]
    arguments += ["--oom-score-adj", str(OOM_SCORE_ADJ)]
    if netns:
        arguments += ["--netns", netns]
    child = _spawn([*arguments, "--", *command])
    try:
        async with asyncio.timeout(timeout_s):
            await _ended(child)
    except BaseException as error:
        await asyncio.shield(asyncio.ensure_future(_undo(child)))
        if isinstance(error, TimeoutError):
            raise VmmTimeout(f"{launcher} did not start {command[0]} within {timeout_s:g} s") from error
        raise
    output, errors = child.communicate()
    if child.returncode != 0:
        raise VmmError(f"{command[0]} was not started: {errors.decode(errors='replace').strip()}")
    return _watch(output)


def _spawn(arguments: list[str]) -> subprocess.Popen[bytes]:
    """Run the launcher; blocks for the millisecond of a vfork.

    Not asyncio's subprocess: cancelled while it starts, that leaves a launcher which nobody waits for.
    """
    try:
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise HostUnsuitable(f"{arguments[0]} cannot be run: {error.strerror}; is `bin_dir` right?") from error


async def _ended(child: subprocess.Popen[bytes]) -> None:
    """Wait for the launcher. Its one line fits the pipe, and what it starts does not keep the pipe open."""
    pidfd = os.pidfd_open(child.pid)
    try:
        await readable(pidfd)
    finally:
        os.close(pidfd)


async def _undo(child: subprocess.Popen[bytes]) -> None:
    """Let the launcher end, then kill what it started.

    Killing the launcher instead would leave its grandchild on the way: started a moment later, and known to nobody.
    """
    try:
        async with asyncio.timeout(UNDO_TIMEOUT_S):
            await _ended(child)
    except TimeoutError:
        child.kill()
    output, _ = child.communicate()
    try:
        started = _watch(output)
    except VmmError:
        return
    started.kill()
    with contextlib.suppress(TimeoutError):  # stuck in the store: it dies when its page is answered
        async with asyncio.timeout(UNDO_TIMEOUT_S):
            await started.wait_exit()
    started.close()


def log_tail(runtime_dir: Path) -> str:
    """The end of what the VMM printed, as one line for an error message; "" when it printed nothing."""
    try:
        with open(runtime_dir / VMM_LOG, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
            return "; ".join(log.read().decode(errors="replace").split("\n")).strip("; ")
    except OSError:
        return ""


def _watch(record: bytes) -> WatchedProcess:
    try:
        fields = json.loads(record)
        pid, ticks = int(fields["pid"]), int(fields["start_time_ticks"])
    except (ValueError, KeyError, TypeError) as error:
        raise VmmError(f"aenv-launch answered no process record: {record[:200]!r}") from error
    return WatchedProcess(pid, ticks)
