"""The VMM driver interface: what `node` needs of a virtual machine monitor, and nothing else.

Owns the vocabulary (machine, files, running VMM) that every driver shares. Does not own disks, memory images or
network slots: it is handed paths and a namespace, and never creates or deletes them. A driver keeps no state of its
own besides the VMM process: everything needed to find the process again is in `VmmRecord`, which the caller stores.

Order of one capture, which the caller keeps (facts: device state may write guest RAM):

    stop -> save_device_state -> (seal the disk, scan and copy the memory) -> cont
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentenv.model import MachineFingerprint, Resources


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """An uncompressed kernel ELF and the initramfs with envd as PID 1. `version` names both in fingerprints."""

    vmlinux: Path
    initramfs: Path
    version: str


@dataclass(frozen=True, slots=True)
class MachineFiles:
    """Where one machine's files are. All exist before the driver is called, but those under `runtime_dir`.

    `memory_image` is always mapped private: the driver must never write it. `runtime_dir` is an empty directory that
    belongs to this VMM alone (control socket, console log); its path is short enough for a Unix socket (< 90 bytes).
    """

    memory_image: Path
    disk: Path
    runtime_dir: Path


@dataclass(frozen=True, slots=True)
class NetworkAttachment:
    """The tap device that the VMM opens, inside the named network namespace (under /run/netns).

    The rest goes onto the guest's kernel command line at a boot, and is the same for all sandboxes of a node.
    `gateway_mac` is a static neighbour entry of the guest; "" leaves it to ARP.
    """

    netns: str
    tap: str
    guest_mac: str
    guest_cidr: str
    gateway: str
    dns: tuple[str, ...]
    gateway_mac: str = ""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """All that a boot or a restore needs."""

    machine_id: str
    resources: Resources
    kernel: GuestKernel
    files: MachineFiles
    network: NetworkAttachment


@dataclass(frozen=True, slots=True)
class VmmRecord:
    """Finds a VMM process again after the server died. JSON-friendly; the caller stores it before the guest runs.

    `start_time_ticks` is field 22 of /proc/PID/stat; with the pid it identifies the process, since pids are reused.
    """

    driver: str
    machine_id: str
    pid: int
    start_time_ticks: int
    runtime_dir: str
    fingerprint: MachineFingerprint
    memory_bytes: int
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryMapping:
    """The guest's RAM in the VMM's address space, for blockd's capture."""

    pid: int
    address: int
    length_bytes: int


class Vmm(Protocol):
    """One VMM process. Every method has a deadline inside and raises:

    `VmmTimeout` (no answer in time; the state is unknown, the caller kills or resumes), `VmmGone` (the process ended),
    `VmmError` (refused). Methods are called by one owner at a time, but `kill` and `wait_exit` may be called at any
    moment, also beside another call. Cancelling a call leaves the VMM usable or ends with `VmmTimeout` on the next.
    """

    @property
    def record(self) -> VmmRecord: ...

    async def stop(self) -> None:
        """Halt the virtual CPUs and drain disk requests. Idempotent."""

    async def cont(self) -> None:
        """Let the virtual CPUs run. Idempotent."""

    async def is_running(self) -> bool:
        """Whether the virtual CPUs run."""

    async def save_device_state(self, path: Path) -> int:
        """Write the state of all devices (not RAM, not disks) of the *stopped* machine; return its size in bytes."""

    async def memory_mapping(self) -> MemoryMapping:
        """Where guest RAM is mapped in the VMM process."""

    def kill(self) -> None:
        """SIGKILL to the process if it is still the recorded one. Never blocks, never fails when it is gone."""

    async def wait_exit(self) -> str:
        """Wait until the process is gone and say how, as far as it can be known ("exited", "killed by 9", ...).

        No deadline of its own: the caller gives one. The process is gone only when this returns: a thread that waits
        for a page of a stuck store keeps it, its tap and its mapping alive after `kill`.
        """

    def console(self, bytes_max: int) -> bytes:
        """The last bytes that the guest wrote to its console."""

    async def close(self) -> None:
        """Drop the control connection; the process goes on. For the server's own shutdown."""


class VmmDriver(Protocol):
    """Makes VMMs. One per process, chosen by `vmm.probe`."""

    @property
    def name(self) -> str:
        """`qemu` or `firecracker`."""

    @property
    def accelerator(self) -> str:
        """`kvm` or `tcg`."""

    def fingerprint(self, spec: MachineSpec) -> MachineFingerprint:
        """What a snapshot of this machine will need. Pure and fast: independent of ids, paths and sockets."""

    async def boot(self, spec: MachineSpec) -> Vmm:
        """Start the machine from its kernel; returns when the VMM runs, long before the guest is up."""

    async def restore(self, spec: MachineSpec, device_state: Path, needs: MachineFingerprint) -> Vmm:
        """Load a device state over `memory_image`; returns with the machine loaded and *stopped*.

        Raises `RestoreRefused` when `needs` differs from this driver's fingerprint, before any process is started.
        """

    async def adopt(self, record: VmmRecord) -> Vmm:
        """Connect to a running VMM again. Raises `VmmGone` when the recorded process no longer exists."""
