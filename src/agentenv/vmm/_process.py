"""One process that is not our child: found by pid and start time, watched and killed through a pidfd.

Owns the pidfd. Does not own the process's control socket nor its files. A pid alone never identifies a process here:
after a server restart the pid may be somebody else's, so the start time is compared after the pidfd is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct

from agentenv.errors import VmmGone
from agentenv.processes import start_time_ticks

# ioctl PIDFD_GET_INFO on the 64-byte struct pidfd_info (Linux 6.13); PIDFD_INFO_EXIT fills exit_code (Linux 6.15).
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60
# The kernel has the exit status only after init reaped the process, which follows the exit within microseconds.
_REAP_ATTEMPTS = 20
_REAP_PAUSE_S = 0.005


async def readable(descriptor: int) -> None:
    """Wait until a descriptor is readable; for a pidfd, until the process ended. Safe to cancel."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


class WatchedProcess:
    """A process by pid and start time. `kill` and `wait_exit` may be called at any moment and more than once."""

    def __init__(self, pid: int, ticks: int) -> None:
        """Open it. Raises `VmmGone` when the process no longer exists or the pid is another's by now."""
        self.pid = pid
        self.start_time_ticks = ticks
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise VmmGone(f"process {pid} no longer exists") from error
        if start_time_ticks(pid) != ticks:
            self.close()
            raise VmmGone(f"process {pid} no longer exists; its pid belongs to another process")
        self._how: str | None = None

    def alive(self) -> bool:
        """Whether the process still is the recorded one and no zombie."""
        return start_time_ticks(self.pid) == self.start_time_ticks

    def kill(self) -> None:
        """Send SIGKILL. Never blocks and never fails; works after `close`, too."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                return
            reopened = self._reopened()
            if reopened is not None:
                try:
                    signal.pidfd_send_signal(reopened, signal.SIGKILL)
                finally:
                    os.close(reopened)

    async def wait_exit(self) -> str:
        """Wait until every thread is gone; return "exited with N", "killed by signal N", or "exited" if unknown.

        Safe to cancel; several callers may wait at once. After `close` it can only tell "exited" once it is so.
        """
        if self._how is not None:
            return self._how
        # A copy for each caller, so that `close` while somebody waits does not hand the number to another file.
        pidfd = os.dup(self._pidfd) if self._pidfd is not None else self._reopened()
        if pidfd is None:
            return "exited"
        try:
            await readable(pidfd)
            self._how = await _how_it_ended(pidfd)
            return self._how
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Drop the pidfd; the process goes on."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _reopened(self) -> int | None:
        """A new pidfd of the recorded process, or None when it is gone."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.alive():
            return pidfd
        os.close(pidfd)
        return None


async def _how_it_ended(pidfd: int) -> str:
    for _ in range(_REAP_ATTEMPTS):
        info = bytearray(struct.pack("<Q", _PIDFD_INFO_EXIT) + bytes(56))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return "exited"
        if struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT:
            (status,) = struct.unpack_from("<i", info, _EXIT_CODE_OFFSET)
            if os.WIFSIGNALED(status):
                return f"killed by signal {os.WTERMSIG(status)}"
            return f"exited with {os.WEXITSTATUS(status)}"
        await asyncio.sleep(_REAP_PAUSE_S)
    return "exited"
