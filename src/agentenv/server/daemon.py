"""A daemon that outlives the server: started through aenv-launch, found again by its record, stopped by signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.errors import HostUnsuitable, OperationFailed

LAUNCH_S_MAX: Final = 10.0
POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class DaemonProcess:
    """A process named by pid and start time; pids alone are reused."""

    pid: int
    start_time_ticks: int
    argv: tuple[str, ...]

    def is_alive(self) -> bool:
        """Whether it still runs. A zombie whose parent is slow to reap it does not."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        fields = stat.rpartition(b")")[2].split()
        return int(fields[19]) == self.start_time_ticks and fields[0] not in (b"Z", b"X")

    def signal(self, number: int) -> None:
        """Send a signal if it is still this process."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    async def stop(self, wait_s_max: float) -> None:
        """SIGTERM, then SIGKILL after `wait_s_max`."""
        self.signal(signal.SIGTERM)
        if not await self._gone(wait_s_max):
            self.signal(signal.SIGKILL)
            await self._gone(wait_s_max)

    async def _gone(self, wait_s_max: float) -> bool:
        until = time.monotonic() + wait_s_max
        while self.is_alive():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(POLL_S)
        return True


def recorded(record: Path) -> DaemonProcess | None:
    """The process of an aenv-launch record, if it still runs."""
    try:
        fields = json.loads(record.read_bytes())
        process = DaemonProcess(int(fields["pid"]), int(fields["start_time_ticks"]), tuple(fields["argv"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if process.is_alive() else None


async def launch(launcher: Path, record: Path, log: Path, command: Sequence[str]) -> DaemonProcess:
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
