"""What the conformance suite needs around a driver: machines, a guest to talk to, captures.

`FakeLab` over `vmm.fake`; `QemuLab` over real microVMs with a busybox guest, plain files as disk and memory image, and
a tap in a namespace of its own per machine. Both clean up after themselves, whatever the test did.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.guest.initramfs import Entry, write_cpio
from agentenv.guest.kernel import Kernel
from agentenv.model import MachineFingerprint, Resources
from agentenv.vmm import (
    GuestKernel,
    MachineFiles,
    MachineSpec,
    MemoryMapping,
    NetworkAttachment,
    Vmm,
    VmmDriver,
    VmmRecord,
)
from agentenv.vmm.fake import PAGE_BYTES, FakeDriver, FakeHost, FakeVmm
from agentenv.vmm.qemu import Deadlines, QemuDriver

MEMORY_MIB = 192
DISK_MIB = 512
GUEST_PORT = 49983
GUEST_UP_S = 60.0


class Lab(ABC):
    """One world for one test."""

    # How long a command to a machine that answers nothing may take before it must have failed.
    deaf_limit_s: float

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vmms: list[Vmm] = []
        self._count = 0
        self.driver = self.new_driver()

    @abstractmethod
    def new_driver(self) -> VmmDriver:
        """A driver as the next server would make it."""

    @abstractmethod
    def network(self) -> NetworkAttachment: ...

    @abstractmethod
    def processes(self) -> int:
        """How many VMM processes of this lab exist."""

    @abstractmethod
    async def write(self, vmm: Vmm, text: str) -> None:
        """Let the guest keep a text in its memory."""

    @abstractmethod
    async def read(self, vmm: Vmm) -> str:
        """Ask the guest for the text."""

    @abstractmethod
    async def capture(self, vmm: Vmm, parent: Path, into: Path) -> int:
        """Write the stopped guest's memory as a new image; return how many bytes were dirty."""

    @abstractmethod
    def make_deaf(self, vmm: Vmm, deaf: bool) -> None:
        """Let the process stop answering, or answer again."""

    @abstractmethod
    async def forget(self, vmm: Vmm) -> VmmRecord:
        """What a server's death leaves: the record. Its connections are gone."""

    def spec(self, image: Path | None = None, disk: Path | None = None) -> MachineSpec:
        """A machine over an all-zero image and an empty disk, or the given ones."""
        self._count += 1
        name = f"m{self._count}"
        runtime = self.root / name
        runtime.mkdir()
        return MachineSpec(
            name,
            Resources(1, MEMORY_MIB, DISK_MIB),
            self.kernel(),
            MachineFiles(image or self._blank(f"{name}.mem", MEMORY_MIB), disk or self.new_disk(name), runtime),
            self.network(),
        )

    def kernel(self) -> GuestKernel:
        return GuestKernel(self.root / "vmlinux", self.root / "initramfs", "test-kernel")

    def new_disk(self, name: str) -> Path:
        return self._blank(f"{name}.disk", DISK_MIB)

    async def boot(self) -> Vmm:
        return self.keep(await self.driver.boot(self.spec()))

    async def restore(self, spec: MachineSpec, state: Path, needs: MachineFingerprint | None = None) -> Vmm:
        return self.keep(await self.driver.restore(spec, state, needs or self.driver.fingerprint(spec)))

    def keep(self, vmm: Vmm) -> Vmm:
        """Have it ended when the test is over."""
        self.vmms.append(vmm)
        return vmm

    async def end(self, vmm: Vmm) -> str:
        """Kill, wait, close."""
        vmm.kill()
        async with asyncio.timeout(20):
            how = await vmm.wait_exit()
        await vmm.close()
        self.vmms.remove(vmm)
        return how

    async def close(self) -> None:
        for vmm in list(self.vmms):
            await self.end(vmm)
        assert self.processes() == 0, "a VMM was left behind"

    def _blank(self, name: str, mib: int) -> Path:
        path = self.root / name
        with open(path, "wb") as file:
            file.truncate(mib << 20)
        return path


class FakeLab(Lab):
    """No process is started; the host outlives the drivers."""

    deaf_limit_s = 1.0

    def __init__(self, root: Path) -> None:
        self.host = FakeHost()
        super().__init__(root)

    def new_driver(self) -> VmmDriver:
        return FakeDriver(self.host)

    def network(self) -> NetworkAttachment:
        return NetworkAttachment("ns", "tap0", "02:ae:00:00:00:02", "10.11.0.2/30", "10.11.0.1", ())

    def processes(self) -> int:
        return len(self.host.processes)

    async def write(self, vmm: Vmm, text: str) -> None:
        self._process(vmm).write(7, text.encode())

    async def read(self, vmm: Vmm) -> str:
        return self._process(vmm).read(7).rstrip(b"\0").decode()

    async def capture(self, vmm: Vmm, parent: Path, into: Path) -> int:
        pages = self._process(vmm).pages
        image = bytearray(parent.read_bytes())
        for number, content in pages.items():
            image[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = content
        into.write_bytes(image)
        return len(pages) * PAGE_BYTES

    def make_deaf(self, vmm: Vmm, deaf: bool) -> None:
        self._process(vmm).deaf = deaf

    async def forget(self, vmm: Vmm) -> VmmRecord:
        self.vmms.remove(vmm)
        await vmm.close()
        return vmm.record

    def _process(self, vmm: Vmm) -> Any:
        assert isinstance(vmm, FakeVmm)
        return vmm.process


GUEST_INIT = b"""#!/bin/busybox sh
/bin/busybox mkdir -p /tmp /disk /ram
/bin/busybox --install -s /bin
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
for m in $(cat /modules/order); do insmod /modules/$m; done
mount -t tmpfs -o size=96m t /ram
mount -t ext4 /dev/vda /disk
ip link set lo up; ip addr add 10.11.0.2/30 dev eth0; ip link set eth0 up
echo GUEST-UP > /dev/console
while true; do nc -ll -p 49983 -e /bin/sh; done
"""


def busybox_initramfs(busybox: Path, modules: Path) -> bytes:
    """A guest that gives whoever connects a shell."""
    folder, file = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755
    return write_cpio(
        [
            Entry("bin", folder),
            Entry("bin/busybox", file, busybox.read_bytes()),
            Entry("dev", folder),
            Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)),
            Entry("init", file, GUEST_INIT),
            Entry("modules", folder),
            *(Entry(f"modules/{f.name}", file, f.read_bytes()) for f in sorted(modules.iterdir())),
            Entry("proc", folder),
            Entry("sys", folder),
        ]
    )


class QemuLab(Lab):
    """Real microVMs under TCG."""

    deadlines = Deadlines(command_s=1.0, stop_s=5.0, settle_s=1.0)
    deaf_limit_s = 3.0

    def __init__(self, root: Path, kernel: Kernel, launcher: Path) -> None:
        self._launcher = launcher
        self._kernel = kernel
        self._networks: list[NetworkAttachment] = []
        # Sockets need a short path, which pytest's own folders are not.
        self._short = Path(tempfile.mkdtemp(prefix="aenvt", dir="/tmp"))
        super().__init__(self._short)
        (self.root / "initramfs").write_bytes(busybox_initramfs(Path("/bin/busybox"), kernel.modules))

    def new_driver(self) -> VmmDriver:
        return QemuDriver("tcg", self._launcher, deadlines=self.deadlines)

    def kernel(self) -> GuestKernel:
        return replace(super().kernel(), vmlinux=self._kernel.vmlinux)

    def new_disk(self, name: str) -> Path:
        path = super().new_disk(name)
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^resize_inode", path], check=True)
        return path

    def network(self) -> NetworkAttachment:
        name = f"aenvt-{os.getpid()}-{len(self._networks)}"
        network = NetworkAttachment(name, "tap0", "02:ae:00:00:00:02", "10.11.0.2/30", "10.11.0.1", ())
        self._networks.append(network)
        for command in (
            f"ip netns add {name}",
            f"ip -n {name} tuntap add tap0 mode tap vnet_hdr",
            f"ip -n {name} link set tap0 address 02:ae:00:00:00:01 up",
            f"ip -n {name} addr add 10.11.0.1/30 dev tap0",
        ):
            subprocess.run(command.split(), check=True)
        return network

    def processes(self) -> int:
        return len(list(self._pids()))

    def _pids(self) -> Iterator[int]:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if str(self._short).encode() in (folder / "cmdline").read_bytes():
                    yield int(folder.name)
            except OSError:
                continue

    async def write(self, vmm: Vmm, text: str) -> None:
        await self.shell(vmm, f"echo {text} > /ram/text")

    async def read(self, vmm: Vmm) -> str:
        return (await self.shell(vmm, "cat /ram/text")).strip()

    async def shell(self, vmm: Vmm, script: str, timeout_s: float = 120.0) -> str:
        """Run a script in the guest; return what it printed."""
        netns = next(n.netns for n, spec in self._specs() if spec == vmm.record.machine_id)
        return await asyncio.to_thread(_in_namespace, netns, lambda: _shell(script, timeout_s))

    def _specs(self) -> Iterator[tuple[NetworkAttachment, str]]:
        """Machines are numbered as their networks are."""
        for number, network in enumerate(self._networks, start=1):
            yield network, f"m{number}"

    async def capture(self, vmm: Vmm, parent: Path, into: Path) -> int:
        mapping = await vmm.memory_mapping()
        return await asyncio.to_thread(capture_memory, mapping, parent, into)

    def make_deaf(self, vmm: Vmm, deaf: bool) -> None:
        os.kill(vmm.record.pid, signal.SIGSTOP if deaf else signal.SIGCONT)

    async def forget(self, vmm: Vmm) -> VmmRecord:
        self.vmms.remove(vmm)
        await vmm.close()
        return vmm.record

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        for network in self._networks:
            subprocess.run(["ip", "netns", "del", network.netns], check=False)
        shutil.rmtree(self._short)


def _in_namespace(netns: str, work: Callable[[], str]) -> str:
    """Run `work` in a thread that entered the namespace, which ends with the thread."""
    result: list[str | BaseException] = []

    def run() -> None:
        try:
            with open(f"/run/netns/{netns}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {netns}")
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _shell(script: str, timeout_s: float) -> str:
    with _connected() as connection:
        connection.settimeout(timeout_s)
        connection.sendall(f"({script}) 2>&1\nexit\n".encode())
        output = b""
        while received := connection.recv(65536):
            output += received
        return output.decode(errors="replace")


def _connected() -> socket.socket:
    """The guest's shell; a guest that boots is not there at once."""
    end = time.monotonic() + GUEST_UP_S
    while True:
        connection = socket.socket()
        connection.settimeout(1.0)
        try:
            connection.connect(("10.11.0.2", GUEST_PORT))
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > end:
                raise


_PAGEMAP_SCAN = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_SCAN_RANGES = 4096


def dirty_ranges(mapping: MemoryMapping) -> Iterator[tuple[int, int]]:
    """Address ranges that are anonymous: the pages that the guest wrote since the image was mapped."""
    vector = ctypes.create_string_buffer(24 * _SCAN_RANGES)
    at, end = mapping.address, mapping.address + mapping.length_bytes
    with open(f"/proc/{mapping.pid}/pagemap", "rb") as pagemap:
        while at < end:
            fields = (96, 0, at, end, 0, ctypes.addressof(vector), _SCAN_RANGES, 0)
            argument = bytearray(struct.pack("<12Q", *fields, _FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT))
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument, True)
            for index in range(count):
                start, stop, _ = struct.unpack_from("<QQQ", vector, 24 * index)
                yield start, stop
            at = struct.unpack_from("<12Q", argument)[4]


def capture_memory(mapping: MemoryMapping, parent: Path, into: Path) -> int:
    """The parent image with the dirty pages over it, as blockd makes it of layers; the bytes that were dirty."""
    subprocess.run(["cp", "--sparse=always", parent, into], check=True)
    dirty = 0
    with open(f"/proc/{mapping.pid}/mem", "rb", buffering=0) as memory, open(into, "r+b", buffering=0) as image:
        for start, stop in dirty_ranges(mapping):
            image.seek(start - mapping.address)
            for piece in range(start, stop, 1 << 20):
                memory.seek(piece)
                image.write(memory.read(min(1 << 20, stop - piece)))
            dirty += stop - start
    return dirty


def image_equals_memory(mapping: MemoryMapping, image: Path) -> bool:
    """Whether every byte of the live memory is in the image."""
    with open(f"/proc/{mapping.pid}/mem", "rb", buffering=0) as memory, open(image, "rb") as file:
        for offset in range(0, mapping.length_bytes, 1 << 20):
            memory.seek(mapping.address + offset)
            if memory.read(1 << 20) != file.read(1 << 20):
                return False
    return True
