"""Starts a VMM through aenv-launch, so that it is nobody's child here and outlives the server.

Owns the call and the reading of its answer. The launcher's own record file is written before the program runs, and
lies in the VMM's runtime directory: a server that died between the start and the caller's own record finds the VMM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import HostUnsuitable, VmmError, VmmTimeout
from agentenv.vmm._process import WatchedProcess

PROCESS_RECORD = "vmm.json"
VMM_LOG = "vmm.log"
LOG_TAIL_BYTES = 2000
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
    try:
        child = await asyncio.create_subprocess_exec(
            *arguments, "--", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise HostUnsuitable(f"{launcher} cannot be run: {error.strerror}; is it built and `bin_dir` right?") from error
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await child.communicate()
    except BaseException as error:
        await _undo(child, record)
        if isinstance(error, TimeoutError):
            raise VmmTimeout(f"{launcher} did not start {command[0]} within {timeout_s:g} s") from error
        raise
    if child.returncode != 0:
        raise VmmError(f"{command[0]} was not started: {errors.decode(errors='replace').strip()}")
    return _watch(output)


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


async def _undo(child: asyncio.subprocess.Process, record: Path) -> None:
    """Kill the launcher and, where it had got so far, what it launched."""
    if child.returncode is None:
        child.kill()
    await asyncio.shield(child.wait())
    try:
        started = _watch(record.read_bytes())
    except (OSError, VmmError):
        return
    started.kill()
    started.close()
