"""A daemon that outlives the server: started through aenv-launch and found again by its record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agentenv.errors import HostUnsuitable, OperationFailed
from agentenv.processes import RecordedProcess, recorded

LAUNCH_S_MAX: Final = 10.0


async def launch(launcher: Path, record: Path, log: Path, command: Sequence[str]) -> RecordedProcess:
    """Start `command` detached. Raises `HostUnsuitable` (no launcher) or `OperationFailed` with its reason."""
    arguments = [str(launcher), "--record", str(record), "--log", str(log), "--", *command]
    try:
        child = await asyncio.create_subprocess_exec(
            *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        hint = "run `make setup` or set server.bin_dir"
        raise HostUnsuitable(f"{launcher} cannot be run: {error.strerror}; {hint}") from error
    async with asyncio.timeout(LAUNCH_S_MAX):
        _, errors = await child.communicate()
    process = recorded(record)
    if child.returncode != 0 or process is None:
        reason = errors.decode(errors="replace").strip() or f"it ended at once; see {log}"
        raise OperationFailed(f"{command[0]} was not started: {reason}")
    return process
