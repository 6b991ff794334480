"""One running QEMU: the `Vmm` interface over QMP.

Owns the control connection, the console and the pidfd of one process; not the files. It keeps no copy of the machine's
state: each question goes to QEMU, so that an adopted VMM behaves as one that was started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import StorageFull, VmmError, VmmGone, VmmTimeout
from agentenv.vmm._console import Console
from agentenv.vmm._memory import find_mapping
from agentenv.vmm._process import WatchedProcess
from agentenv.vmm._qmp import ConnectionLost, QmpClient
from agentenv.vmm.driver import MemoryMapping, VmmRecord

CONSOLE_SAVED = "console.log"
_STATE_FD_NAME = "device-state"
# Far above the 100 KiB of our machines.
STATE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each step may take, in seconds. Far above what was measured: a loaded host is slow, not broken."""

    # Launch to QMP greeting; 30 ms on an idle host.
    start_s: float = 30.0
    # Loading a device state; 5 ms. It may read memory pages through the store.
    load_s: float = 30.0
    # `stop` waits for the guest's disk requests to end; 10 ms under a heavy writer. One that waits for a remote store
    # ends after blockd's 60 s at the latest, and giving up before that would lose a sandbox that can be saved.
    stop_s: float = 75.0
    # Everything else; 1 ms.
    command_s: float = 10.0
    # How long a process may take to be gone after it hung up, before the loss counts as a timeout.
    settle_s: float = 1.0
    # How long the clean-up of a failed start waits for the killed process.
    destroy_s: float = 5.0


def _has_room(folder: Path) -> bool:
    """Whether a device state fits there; True where nobody can tell."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return True
    return space.f_bfree * space.f_frsize >= STATE_BYTES_MAX


class QemuVmm:
    """See `Vmm` for the contract of each method."""

    def __init__(self, record: VmmRecord, process: WatchedProcess, console: Console, deadlines: Deadlines) -> None:
        self._record = record
        self._process = process
        self._console = console
        self._deadlines = deadlines
        self._qmp: QmpClient | None = None
        self._mapping: MemoryMapping | None = None
        self._guest_ended: str | None = None
        self._migrated: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def record(self) -> VmmRecord:
        return self._record

    def connected(self, qmp: QmpClient, console: Path) -> None:
        """Take over a negotiated connection; the driver calls it once."""
        self._qmp = qmp
        self._console.attach(console)

    def handle_event(self, name: str, data: Mapping[str, Any]) -> None:
        """Events of the connection: the end of a restore, and why a guest ended."""
        if name == "SHUTDOWN":
            self._guest_ended = str(data.get("reason", "unknown"))
        elif name == "MIGRATION" and data.get("status") in ("completed", "failed") and not self._migrated.done():
            self._migrated.set_result(data["status"])

    async def load_device_state(self, state: int) -> None:
        """Load from a descriptor into a machine that waits for it. Only the driver's `restore` calls it."""
        load_s = self._deadlines.load_s
        # Sent together: QEMU runs them in order, and a round trip is saved.
        named = self._client().start("getfd", {"fdname": _STATE_FD_NAME}, fd=state)
        await self._command("migrate-incoming", {"uri": f"fd:{_STATE_FD_NAME}"}, timeout_s=load_s)
        await named
        exiting = asyncio.ensure_future(self._process.wait_exit())
        try:
            # A state that does not load makes QEMU exit, without any event.
            await asyncio.wait((self._migrated, exiting), timeout=load_s, return_when=asyncio.FIRST_COMPLETED)
            if self._migrated.done():
                if self._migrated.result() != "completed":
                    raise VmmError("QEMU could not load the device state")
            elif exiting.done():
                raise VmmGone(f"QEMU (process {self._process.pid}) has {exiting.result()} while it loaded the state")
            else:
                raise VmmTimeout(f"QEMU did not load the device state within {load_s:g} s")
        finally:
            exiting.cancel()

    async def stop(self) -> None:
        await self._command("stop", timeout_s=self._deadlines.stop_s)

    async def cont(self) -> None:
        await self._command("cont")

    async def is_running(self) -> bool:
        return bool((await self._command("query-status"))["running"])

    async def save_device_state(self, path: Path) -> int:
        # QEMU would stop a running machine by itself, save, and let it run: never the instant that the caller means.
        if await self.is_running():
            raise VmmError("the device state of a running machine cannot be saved; stop it first")
        try:
            # `live` defaults to true, which would give up the disks as if the guest moved elsewhere.
            await self._command("xen-save-devices-state", {"filename": str(path), "live": False})
            return path.stat().st_size
        except BaseException as error:
            # QEMU says "an IO error", whatever it was.
            is_full = type(error) is VmmError and not _has_room(path.parent)
            path.unlink(missing_ok=True)
            if is_full:
                raise StorageFull(f"no room for a device state in {path.parent}: the disk is full") from error
            raise

    async def memory_mapping(self) -> MemoryMapping:
        if self._mapping is None:
            image = Path(self._record.extra["memory_image"])
            self._mapping = find_mapping(self._process, image, self._record.memory_bytes)
        elif not self._process.alive():
            raise VmmGone(f"QEMU (process {self._process.pid}) no longer exists")
        return self._mapping

    def kill(self) -> None:
        self._process.kill()

    async def wait_exit(self) -> str:
        how = await self._process.wait_exit()
        return f"{how} ({self._guest_ended})" if self._guest_ended else how

    def console(self, bytes_max: int) -> bytes:
        return self._console.tail(bytes_max)

    async def close(self) -> None:
        """See `Vmm.close`. Waiting `wait_exit` calls go on; afterwards only `kill`, `record` and `console` work."""
        self._console.close()
        if self._qmp is not None:
            await self._qmp.close()
        self._process.close()

    async def destroy(self) -> None:
        """Kill and wait, within bounds, then close: the way out of a failed start. Safe to call when cancelled."""

        async def end() -> None:
            self._process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.destroy_s):
                    await self._process.wait_exit()
            await self.close()

        await asyncio.shield(asyncio.ensure_future(end()))

    def _client(self) -> QmpClient:
        if self._qmp is None:
            raise VmmError("this VMM is not connected")
        return self._qmp

    async def _command(
        self, command: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """One command; a lost connection becomes `VmmGone` when the process is gone, else `VmmTimeout`."""
        limit_s = self._deadlines.command_s if timeout_s is None else timeout_s
        try:
            return await self._client().execute(command, arguments, timeout_s=limit_s)
        except VmmTimeout:
            if not self._process.alive():
                raise VmmGone(f"QEMU (process {self._process.pid}) died during `{command}`") from None
            raise
        except ConnectionLost as error:
            await self._raise_if_gone(command)
            raise VmmTimeout(f"the control connection broke during `{command}`: {error}") from error

    async def _raise_if_gone(self, command: str) -> None:
        """A process that hung up is most often about to be gone: wait a moment for the better answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadlines.settle_s):
                how = await self._process.wait_exit()
            raise VmmGone(f"QEMU (process {self._process.pid}) has {how} before or during `{command}`")
