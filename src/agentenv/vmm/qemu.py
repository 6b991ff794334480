"""The QEMU driver: `microvm` machines under KVM or TCG.

Owns the sequence of a boot, a restore and an adoption. The command line is `_command.py`'s, the control protocol
`_qmp.py`'s, the process `_process.py`'s. It writes into `runtime_dir` alone, and never cleans it: the caller deletes
that directory when `wait_exit` has returned, since only the caller knows when nobody reads the console any more.

    launch (aenv-launch) -> QMP greeting -> boot: cont
                                         -> restore: getfd, migrate-incoming, MIGRATION event; stays stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from agentenv.errors import RestoreRefused, VmmError, VmmGone, VmmTimeout
from agentenv.model import MachineFingerprint
from agentenv.vmm._command import (
    CONSOLE_SOCKET,
    QMP_SOCKET,
    Accelerator,
    boot_arguments,
    command_hash,
    machine_arguments,
    probe_arguments,
    restore_arguments,
)
from agentenv.vmm._console import CONSOLE_BYTES_MAX, Console
from agentenv.vmm._fingerprint import differences
from agentenv.vmm._host import HostFacts, QemuBinary
from agentenv.vmm._launch import launch, log_tail
from agentenv.vmm._process import WatchedProcess
from agentenv.vmm._qemu_vmm import CONSOLE_SAVED, Deadlines, QemuVmm
from agentenv.vmm._qmp import ConnectionLost, QmpClient
from agentenv.vmm.driver import GuestKernel, MachineSpec, VmmRecord

DRIVER_NAME = "qemu"
# A Unix socket's path holds 107 bytes.
RUNTIME_DIR_BYTES_MAX = 90
# How often the probe looks at its guest's console.
PROBE_LOOK_S = 0.02


class QemuDriver:
    """Makes QEMU machines with one accelerator. Holds no state but facts of the host."""

    def __init__(
        self,
        accelerator: str,
        launcher: Path,
        *,
        binary: QemuBinary | None = None,
        facts: HostFacts | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Reads the host, about 30 ms. Raises `HostUnsuitable` when QEMU is missing."""
        if accelerator not in ("kvm", "tcg"):
            raise ValueError(f"unknown accelerator {accelerator!r}")
        self._binary = binary or QemuBinary()
        self._facts = facts or HostFacts.read()
        self._launcher = launcher
        self._deadlines = deadlines or Deadlines()
        aio = "io_uring" if self._facts.io_uring else "threads"
        self._accelerator = Accelerator(accelerator, self._facts.tsc_khz, aio)

    @property
    def name(self) -> str:
        return DRIVER_NAME

    @property
    def accelerator(self) -> str:
        return self._accelerator.name

    def fingerprint(self, spec: MachineSpec) -> MachineFingerprint:
        """See `VmmDriver.fingerprint`. Under TCG every host's guest sees the same emulated CPU."""
        kvm = self._accelerator.name == "kvm"
        return MachineFingerprint(
            driver=DRIVER_NAME,
            accelerator=self._accelerator.name,
            vmm_build=self._binary.build,
            cpu_model=f"host:{self._facts.cpu_identity}" if kvm else "max",
            kernel=spec.kernel.version,
            tsc_khz=self._facts.tsc_khz,
            command_hash=command_hash(spec, self._accelerator),
        )

    async def boot(self, spec: MachineSpec) -> QemuVmm:
        """See `VmmDriver.boot`. Cancelling it leaves no process."""
        vmm = await self._start(spec, boot_arguments(spec, self._accelerator))
        try:
            await vmm.cont()
        except BaseException:
            await vmm.destroy()
            raise
        return vmm

    async def restore(self, spec: MachineSpec, device_state: Path, needs: MachineFingerprint) -> QemuVmm:
        """See `VmmDriver.restore`. Cancelling it leaves no process."""
        self._binary.refresh()
        different = differences(needs, self.fingerprint(spec))
        if different:
            raise RestoreRefused(f"this node cannot restore the snapshot: {'; '.join(different)}")
        try:
            state = os.open(device_state, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise VmmError(f"the device state {device_state} cannot be read: {error.strerror}") from error
        try:
            vmm = await self._start(spec, restore_arguments())
            try:
                await vmm.load_device_state(state)
            except BaseException:
                await vmm.destroy()
                raise
            return vmm
        finally:
            os.close(state)

    async def boots(self, kernel: GuestKernel, runtime_dir: Path, marker: bytes, timeout_s: float) -> None:
        """Boot a guest without disk and network until its console shows `marker`; for the probe.

        Raises `VmmError` with what happened instead, within `timeout_s` and the clean-up. Leaves no process.
        """
        command = [self._binary.path, *probe_arguments(kernel, runtime_dir, self._accelerator)]
        vmm: QemuVmm | None = None
        try:
            async with asyncio.timeout(timeout_s):
                vmm = await self._launch(command, "", _probe_record(runtime_dir))
                await vmm.cont()
                ended = asyncio.ensure_future(vmm.wait_exit())
                while marker not in vmm.console(CONSOLE_BYTES_MAX):
                    done, _ = await asyncio.wait((ended,), timeout=PROBE_LOOK_S)
                    if done and marker not in vmm.console(CONSOLE_BYTES_MAX):
                        raise VmmError(f"the guest ended without reaching user space: {ended.result()}")
                ended.cancel()
        except TimeoutError as error:
            raise VmmTimeout(f"the guest did not reach user space within {timeout_s:g} s") from error
        finally:
            if vmm is not None:
                await vmm.destroy()

    async def adopt(self, record: VmmRecord) -> QemuVmm:
        """See `VmmDriver.adopt`. Raises `VmmTimeout` when the process lives and does not answer; it is not killed."""
        process = WatchedProcess(record.pid, record.start_time_ticks)
        try:
            # A running QEMU answers at once: what it needs is a command's time, not a start's.
            return await self._attach(process, record, self._deadlines.command_s)
        except BaseException:
            process.close()
            raise

    async def _start(self, spec: MachineSpec, more: list[str]) -> QemuVmm:
        """Launch QEMU and connect to it; the machine is stopped. Leaves nothing behind when it fails."""
        self._binary.refresh()
        runtime_dir = spec.files.runtime_dir
        if len(os.fsencode(runtime_dir)) >= RUNTIME_DIR_BYTES_MAX:
            raise VmmError(f"{runtime_dir} is too long for a Unix socket; the limit is {RUNTIME_DIR_BYTES_MAX} bytes")
        command = [self._binary.path, *machine_arguments(spec, self._accelerator), *more]
        record = VmmRecord(
            driver=DRIVER_NAME,
            machine_id=spec.machine_id,
            pid=0,
            start_time_ticks=0,
            runtime_dir=str(runtime_dir),
            fingerprint=self.fingerprint(spec),
            memory_bytes=spec.resources.memory_mib << 20,
            extra={"memory_image": str(spec.files.memory_image)},
        )
        return await self._launch(command, spec.network.netns, record)

    async def _launch(self, command: list[str], netns: str, record: VmmRecord) -> QemuVmm:
        """Run a command line and complete the record with the process."""
        runtime_dir = Path(record.runtime_dir)
        process = await launch(self._launcher, runtime_dir, netns, command, self._deadlines.start_s)
        record = replace(record, pid=process.pid, start_time_ticks=process.start_time_ticks)
        try:
            return await self._attach(process, record, self._deadlines.start_s)
        except BaseException as error:
            await self._end(process)
            if isinstance(error, VmmGone):
                raise VmmError(f"QEMU ended while it started: {log_tail(runtime_dir) or 'it said nothing'}") from error
            raise

    async def _attach(self, process: WatchedProcess, record: VmmRecord, timeout_s: float) -> QemuVmm:
        """Connect QMP and console of a running process."""
        runtime_dir = Path(record.runtime_dir)
        vmm = QemuVmm(record, process, Console(runtime_dir / CONSOLE_SAVED), self._deadlines)
        connecting = asyncio.ensure_future(QmpClient.connect(runtime_dir / QMP_SOCKET, vmm.handle_event, timeout_s))
        exiting = asyncio.ensure_future(process.wait_exit())
        try:
            await asyncio.wait((connecting, exiting), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise VmmGone(f"QEMU (process {process.pid}) has {exiting.result()}")
            vmm.connected(await connecting, runtime_dir / CONSOLE_SOCKET)
        except ConnectionLost as error:
            await self._settle(process)
            raise VmmTimeout(f"QEMU (process {process.pid}) closed its control socket: {error}") from error
        finally:
            exiting.cancel()
            if not connecting.done():
                connecting.cancel()
            await asyncio.gather(exiting, connecting, return_exceptions=True)
        return vmm

    async def _settle(self, process: WatchedProcess) -> None:
        """A lost connection most often means a dying process: give it a moment to be gone, then say so."""
        try:
            async with asyncio.timeout(self._deadlines.settle_s):
                how = await process.wait_exit()
        except TimeoutError:
            return
        raise VmmGone(f"QEMU (process {process.pid}) has {how}")

    async def _end(self, process: WatchedProcess) -> None:
        """Kill a process that never became a `QemuVmm`, and wait for it, within bounds, also when cancelled."""
        process.kill()

        async def reap() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.destroy_s):
                    await process.wait_exit()
            process.close()

        await asyncio.shield(asyncio.ensure_future(reap()))


def _probe_record(runtime_dir: Path) -> VmmRecord:
    """A record that is never stored: the probe's process dies with the probe."""
    nothing = MachineFingerprint(DRIVER_NAME, "", "", "", "", 0, "")
    return VmmRecord(DRIVER_NAME, "probe", 0, 0, str(runtime_dir), nothing, 0)
