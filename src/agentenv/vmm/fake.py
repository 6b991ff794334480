"""A VMM driver without VMMs, for tests of the node: same interface, same state machine, same errors.

`FakeHost` is the world that survives the server: processes by pid, which a second `FakeDriver` on the same host adopts.
A guest is a dictionary of memory pages over its image file. Nothing here sleeps or starts a process; a delay is an
event that the test releases. The conformance suite runs on this and on the real drivers alike.

    loaded (stopped) <-> running -> gone
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.errors import RestoreRefused, VmmError, VmmGone, VmmTimeout
from agentenv.model import MachineFingerprint
from agentenv.vmm._fingerprint import differences
from agentenv.vmm.driver import MachineSpec, MemoryMapping, VmmRecord

PAGE_BYTES = 4096
DRIVER_NAME = "fake"
# Where a fake guest's RAM claims to be; no address of a real process.
_FAKE_ADDRESS = 0x7F00_0000_0000


class Step(enum.StrEnum):
    """The points at which a test can make a call fail or wait."""

    BOOT = "boot"
    RESTORE = "restore"
    ADOPT = "adopt"
    STOP = "stop"
    CONT = "cont"
    IS_RUNNING = "is_running"
    SAVE = "save_device_state"
    MAPPING = "memory_mapping"
    EXIT = "exit"


@dataclass(slots=True)
class FakeProcess:
    """One fake VMM process: what the "kernel" knows of it."""

    record: VmmRecord
    memory_image: Path
    running: bool = False
    # Answers nothing, as a SIGSTOPped process: every command is `VmmTimeout`.
    deaf: bool = False
    ended: str | None = None
    pages: dict[int, bytes] = field(default_factory=dict)
    console: bytearray = field(default_factory=bytearray)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, page: int, content: bytes) -> None:
        """What a guest does: dirty one page. Raises `VmmError` when the virtual CPUs are stopped."""
        if not self.running:
            raise VmmError("a stopped guest writes nothing")
        self.pages[page] = content.ljust(PAGE_BYTES, b"\0")

    def read(self, page: int) -> bytes:
        """One page: the guest's own copy, or the image's."""
        if page in self.pages:
            return self.pages[page]
        with open(self.memory_image, "rb") as image:
            image.seek(page * PAGE_BYTES)
            return image.read(PAGE_BYTES).ljust(PAGE_BYTES, b"\0")


class FakeHost:
    """The processes, and the faults that tests plant. Outlives drivers as a host outlives servers."""

    def __init__(self) -> None:
        self.processes: dict[int, FakeProcess] = {}
        self._next_pid = 100_000
        self._failures: dict[Step, list[BaseException]] = defaultdict(list)
        self._gates: dict[Step, asyncio.Event] = {}
        self.reached: dict[Step, asyncio.Event] = defaultdict(asyncio.Event)

    def fail(self, step: Step, error: BaseException) -> None:
        """The next call that gets to `step` raises `error`; several queue up."""
        self._failures[step].append(error)

    def hold(self, step: Step) -> asyncio.Event:
        """Calls that get to `step` wait until the returned event is set; `reached[step]` tells that one came."""
        self._gates[step] = asyncio.Event()
        self.reached[step].clear()
        return self._gates[step]

    async def pass_through(self, step: Step) -> None:
        """Where every fake call goes by."""
        gate = self._gates.get(step)
        if gate is not None and not gate.is_set():
            self.reached[step].set()
            await gate.wait()
        if self._failures[step]:
            raise self._failures[step].pop(0)

    def start(self, spec: MachineSpec, fingerprint: MachineFingerprint) -> FakeProcess:
        """A new process, stopped."""
        self._next_pid += 1
        record = VmmRecord(
            driver=DRIVER_NAME,
            machine_id=spec.machine_id,
            pid=self._next_pid,
            start_time_ticks=self._next_pid * 7,
            runtime_dir=str(spec.files.runtime_dir),
            fingerprint=fingerprint,
            memory_bytes=spec.resources.memory_mib << 20,
            extra={"memory_image": str(spec.files.memory_image)},
        )
        process = FakeProcess(record, spec.files.memory_image)
        self.processes[process.record.pid] = process
        return process

    def end(self, pid: int, how: str = "exited with 0 (guest-shutdown)") -> None:
        """The process is over, as when its guest powers off or it crashes. Does nothing for one that is gone.

        While `Step.EXIT` is held its remains stay (a thread stuck in the store) until the gate opens.
        """
        process = self.processes.get(pid)
        if process is None or process.ended is not None:
            return
        process.ended = how
        process.running = False
        gate = self._gates.get(Step.EXIT)
        if gate is None or gate.is_set():
            self._bury(process)
        else:
            self.reached[Step.EXIT].set()

    def release_exits(self) -> None:
        """Open the `Step.EXIT` gate: all that ended is gone now."""
        gate = self._gates.get(Step.EXIT)
        if gate is not None:
            gate.set()
        for process in list(self.processes.values()):
            if process.ended is not None:
                self._bury(process)

    def _bury(self, process: FakeProcess) -> None:
        self.processes.pop(process.record.pid, None)
        process.gone.set()


class FakeVmm:
    """See `Vmm`; the strictness is the real driver's."""

    def __init__(self, host: FakeHost, process: FakeProcess) -> None:
        self._host = host
        self._closed = False
        self.process = process

    @property
    def record(self) -> VmmRecord:
        return self.process.record

    async def stop(self) -> None:
        await self._command(Step.STOP)
        self.process.running = False

    async def cont(self) -> None:
        await self._command(Step.CONT)
        self.process.running = True

    async def is_running(self) -> bool:
        await self._command(Step.IS_RUNNING)
        return self.process.running

    async def save_device_state(self, path: Path) -> int:
        await self._command(Step.SAVE)
        if self.process.running:
            raise VmmError("the device state of a running machine cannot be saved; stop it first")
        state = {"fake_device_state": 1, "memory_bytes": self.record.memory_bytes}
        return path.write_text(json.dumps(state))

    async def memory_mapping(self) -> MemoryMapping:
        await self._command(Step.MAPPING)
        return MemoryMapping(self.record.pid, _FAKE_ADDRESS, self.record.memory_bytes)

    def kill(self) -> None:
        self._host.end(self.record.pid, "killed by signal 9")

    async def wait_exit(self) -> str:
        await self.process.gone.wait()
        return self.process.ended or "exited"

    def console(self, bytes_max: int) -> bytes:
        return bytes(self.process.console[-bytes_max:]) if bytes_max > 0 else b""

    async def close(self) -> None:
        self._closed = True

    async def _command(self, step: Step) -> None:
        """A command's way: the planted faults, then what the process's condition makes of it."""
        self._check(step)
        await self._host.pass_through(step)
        # Again: it may have died while the call waited at the gate.
        self._check(step)

    def _check(self, step: Step) -> None:
        if self.process.ended is not None:
            raise VmmGone(f"process {self.record.pid} has {self.process.ended} before or during `{step}`")
        if self._closed:
            raise VmmTimeout("the control connection was closed by this side")
        if self.process.deaf:
            raise VmmTimeout(f"`{step}` was not answered")


class FakeDriver:
    """See `VmmDriver`. Two drivers on one `FakeHost` are two servers one after the other."""

    def __init__(self, host: FakeHost | None = None, *, build: str = "fake 1") -> None:
        self.host = host or FakeHost()
        self._build = build

    @property
    def name(self) -> str:
        return DRIVER_NAME

    @property
    def accelerator(self) -> str:
        return "tcg"

    def fingerprint(self, spec: MachineSpec) -> MachineFingerprint:
        shape = f"{spec.resources.cpu_count} CPU, {spec.resources.memory_mib} MiB"
        return MachineFingerprint(DRIVER_NAME, "tcg", self._build, "fake", spec.kernel.version, 1_000_000, shape)

    async def boot(self, spec: MachineSpec) -> FakeVmm:
        vmm = await self._start(Step.BOOT, spec)
        vmm.process.running = True
        vmm.process.console += b"fake guest booted\n"
        return vmm

    async def restore(self, spec: MachineSpec, device_state: Path, needs: MachineFingerprint) -> FakeVmm:
        different = differences(needs, self.fingerprint(spec))
        if different:
            raise RestoreRefused(f"this node cannot restore the snapshot: {'; '.join(different)}")
        state: object = None
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(device_state.read_bytes())
        if not isinstance(state, dict) or state.get("fake_device_state") != 1:
            raise VmmError(f"the device state {device_state} cannot be loaded")
        return await self._start(Step.RESTORE, spec)

    async def adopt(self, record: VmmRecord) -> FakeVmm:
        await self.host.pass_through(Step.ADOPT)
        process = self.host.processes.get(record.pid)
        if process is None or process.record.start_time_ticks != record.start_time_ticks or process.ended is not None:
            raise VmmGone(f"process {record.pid} no longer exists")
        if process.deaf:
            raise VmmTimeout(f"process {record.pid} does not answer")
        return FakeVmm(self.host, process)

    async def _start(self, step: Step, spec: MachineSpec) -> FakeVmm:
        """The process exists from the first moment of a start, and is gone when the start fails or is cancelled."""
        process = self.host.start(spec, self.fingerprint(spec))
        try:
            await self.host.pass_through(step)
        except BaseException:
            self.host.end(process.record.pid, "killed by signal 9")
            raise
        if process.ended is not None:
            raise VmmError(f"the VMM ended while it started: {process.ended}")
        return FakeVmm(self.host, process)
