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

    `memory_image` is always mapped private: the driver must never write it. Its path must be the one that the kernel
    shows in /proc/PID/maps (no symbolic links). `runtime_dir` is an empty directory that belongs to this VMM alone
    (sockets, vmm.json of the launcher, vmm.log, console.log); its path is short enough for a Unix socket (< 90 bytes).
    The caller makes it before a start and deletes it after `wait_exit` returned, also when the start failed.
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
    A server that dies between the start and storing this finds pid and start time in RUNTIME_DIR/vmm.json, which the
    launcher wrote before the VMM ran: such a VMM is nobody's and is killed.
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
        """Halt the virtual CPUs and drain disk requests. Idempotent.

        A disk or memory page that the store does not answer makes it wait: `VmmTimeout`, and the state is unknown.
        """

    async def cont(self) -> None:
        """Let the virtual CPUs run. Idempotent."""

    async def is_running(self) -> bool:
        """Whether the virtual CPUs run."""

    async def save_device_state(self, path: Path) -> int:
        """Write the state of all devices (not RAM, not disks) of the *stopped* machine; return its size in bytes.

        Not durable: the caller syncs it. `VmmError` when the machine runs, `StorageFull` when the disk is full; no file
        stays when it fails. It may write guest RAM, so memory is scanned afterwards.
        """

    async def memory_mapping(self) -> MemoryMapping:
        """Where guest RAM is mapped in the VMM process: one private range, equal for the life of the process."""

    def kill(self) -> None:
        """SIGKILL to the process if it is still the recorded one. Never blocks, never fails when it is gone."""

    async def wait_exit(self) -> str:
        """Wait until the process is gone and say how, as far as it can be known.

        "killed by signal 9", "exited with 1", "exited" (unknown: the kernel is older than 6.15, or init reaped late),
        with the guest's own reason behind it where it had one: "(guest-shutdown)" for a power-off, "(guest-reset)" for
        a reboot or a panic. For people and tombstones, not to decide on.

        No deadline of its own: the caller gives one. The process is gone only when this returns: a thread that waits
        for a page of a stuck store keeps it, its tap and its mapping alive after `kill`.
        """

    def console(self, bytes_max: int) -> bytes:
        """The last bytes that the guest wrote to its console, at most 64 KiB, also after the VMM died.

        What a guest prints while no server is connected is not kept; nothing of it ever fills the host's disk.
        """

    async def close(self) -> None:
        """Drop the control connection and all descriptors; the process goes on. Idempotent.

        For the server's own shutdown (the console's tail is left for `adopt`), and after `wait_exit`. Afterwards only
        `record`, `console`, `kill` and `wait_exit` work.
        """


class VmmDriver(Protocol):
    """Makes VMMs. One per process, chosen by `vmm.probe`."""

    @property
    def name(self) -> str:
        """`qemu`, `firecracker`, or `fake`."""

    @property
    def accelerator(self) -> str:
        """`kvm` or `tcg`."""

    def fingerprint(self, spec: MachineSpec) -> MachineFingerprint:
        """What a snapshot of this machine will need. Pure and fast: independent of ids, paths and sockets."""

    async def boot(self, spec: MachineSpec) -> Vmm:
        """Start the machine from its kernel; returns when the virtual CPUs run, long before the guest is up.

        Raises `VmmError` with what the VMM printed when it ends at once, or `VmmTimeout`. Whatever it raises, and when
        it is cancelled, no process stays.
        """

    async def restore(self, spec: MachineSpec, device_state: Path, needs: MachineFingerprint) -> Vmm:
        """Load a device state over `memory_image`; returns with the machine loaded and *stopped*.

        Raises `RestoreRefused` when `needs` differs from this driver's fingerprint, before any process is started: each
        differing field is listed with both values. `kernel` is not compared (the guest has its own in memory, and
        `spec.kernel` is not read), and `tsc_khz` may differ by 250 parts in a million. Raises `VmmError` for a state
        that does not load. Whatever it raises, and when it is cancelled, no process stays.
        """

    async def adopt(self, record: VmmRecord) -> Vmm:
        """Connect to a running VMM again, in whatever state it is.

        Raises `VmmGone` when the recorded process no longer exists, and `VmmTimeout` when it lives and does not answer
        (or another server still holds its control socket); it is not killed.
        """
