"""A process by pid and start time, as aenv-launch and the two daemons record it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """A pid alone may belong to another process by now; the start time (clock ticks since boot) tells."""

    pid: int
    start_time_ticks: int

    def is_alive(self) -> bool:
        """Whether it still runs; one that ended and waits to be reaped does not."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        fields = stat.rpartition(")")[2].split()
        return int(fields[19]) == self.start_time_ticks and fields[0] not in "ZX"

    def signal(self, number: int) -> None:
        """Send a signal if it is still this process."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The pidfd holds the number: if the start time is right now, it cannot become another's meanwhile.
            if self.is_alive():
                os.kill(self.pid, number)
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)


def recorded(path: Path) -> RecordedProcess | None:
    """The process of a record, if it still runs."""
    try:
        fields = json.loads(path.read_bytes())
        process = RecordedProcess(int(fields["pid"]), int(fields["start_time_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if process.is_alive() else None
