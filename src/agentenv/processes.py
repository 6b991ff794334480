"""Processes that are nobody's child, by pid and start time, as aenv-launch and the daemons of this project record them.

Owns the form of a record and what may be done to a process by it. Does not start any, and does not watch: who must know
the moment when every thread is gone, or how it ended, holds a pidfd (`vmm._process`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """A pid alone may belong to another process by now; the start time (clock ticks since boot) tells."""

    pid: int
    start_time_ticks: int
    argv: tuple[str, ...] = ()

    def is_alive(self) -> bool:
        """Whether it still runs; one that ended and waits to be reaped does not."""
        return start_time_ticks(self.pid) == self.start_time_ticks

    def signal(self, number: int) -> None:
        """Send a signal if it is still this process."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Once the pidfd is open, a right start time says that it is this process's and no later one's.
            if self.is_alive():
                signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)

    async def stop(self, wait_s_max: float) -> None:
        """SIGTERM, then SIGKILL after `wait_s_max`."""
        self.signal(signal.SIGTERM)
        if not await self._gone(wait_s_max):
            self.signal(signal.SIGKILL)
            await self._gone(wait_s_max)

    async def kill(self, wait_s_max: float) -> bool:
        """SIGKILL; whether it was gone within `wait_s_max`."""
        self.signal(signal.SIGKILL)
        return await self._gone(wait_s_max)

    async def _gone(self, wait_s_max: float) -> bool:
        until = time.monotonic() + wait_s_max
        while self.is_alive():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(POLL_S)
        return True


def recorded(record: Path) -> RecordedProcess | None:
    """The process of a record, if it still runs. A record that is missing or damaged names nobody."""
    try:
        fields = json.loads(record.read_bytes())
        # Only aenv-launch's own records hold the command line.
        process = RecordedProcess(int(fields["pid"]), int(fields["start_time_ticks"]), tuple(fields.get("argv", ())))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if process.is_alive() else None


def start_time_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)), or None when there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name may hold spaces and brackets; everything after the last bracket is plain.
    fields = stat.rpartition(b")")[2].split()
    return None if len(fields) < 20 or fields[0] in (b"Z", b"X") else int(fields[19])
