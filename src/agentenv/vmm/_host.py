"""What of this host decides whether a device state loads here: QEMU's build, the CPU, the time stamp counter.

Owns reading it, once per server start; nothing here changes while the host is up, but QEMU's package, which
`QemuBinary` therefore looks at again before each start.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostUnsuitable

QEMU_PROGRAM = "qemu-system-x86_64"
VERSION_TIMEOUT_S = 20.0

_SYS_PERF_EVENT_OPEN = 298
_SYS_IO_URING_SETUP = 425
_PERF_TYPE_SOFTWARE, _PERF_COUNT_SW_DUMMY = 1, 9
_PERF_CAP_USER_TIME = 1 << 3


@dataclass(frozen=True, slots=True)
class HostFacts:
    """`tsc_khz` is what the guest's clock counts with; `cpu_identity` changes when the guest would see another CPU."""

    tsc_khz: int
    cpu_identity: str
    io_uring: bool

    @classmethod
    def read(cls) -> HostFacts:
        """Raises `HostUnsuitable` when the counter's frequency cannot be found."""
        cpuinfo = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        return cls(_tsc_khz(cpuinfo), _cpu_identity(cpuinfo), _has_io_uring())


class QemuBinary:
    """One QEMU program and its build, which is read again when the file was replaced by an upgrade."""

    def __init__(self, program: str = QEMU_PROGRAM) -> None:
        """Raises `HostUnsuitable` when the program is missing or does not run."""
        found = shutil.which(program)
        if found is None:
            raise HostUnsuitable(f"{program} is not installed; install the package qemu-system-x86")
        self.path = found
        self._signature = self._sign()
        self.build = self._version()

    def refresh(self) -> None:
        """Read the build again if the file changed: microseconds when not, 20 ms when so."""
        signature = self._sign()
        if signature != self._signature:
            self.build = self._version()
            self._signature = signature

    def _sign(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise HostUnsuitable(f"{self.path} cannot be found any more: {error.strerror}") from error
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _version(self) -> str:
        """Such as `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)`: version and package."""
        try:
            done = subprocess.run(
                [self.path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise HostUnsuitable(f"`{self.path} --version` failed: {error}") from error
        return done.stdout.partition("\n")[0].removeprefix("QEMU emulator version ").strip()


def _tsc_khz(cpuinfo: str) -> int:
    """The frequency that the host's kernel uses; else the CPU's clock, which equals it in a virtual machine.

    /proc/cpuinfo alone would be wrong on bare metal, where "cpu MHz" is the momentary speed of one core.
    """
    calibrated = _perf_tsc_khz()
    if calibrated is not None:
        return calibrated
    found = re.search(r"^cpu MHz\s*:\s*([0-9.]+)", cpuinfo, re.MULTILINE)
    if found is None:
        raise HostUnsuitable("neither perf_event_open nor /proc/cpuinfo tells the frequency of the time stamp counter")
    return int(float(found[1]) * 1000)


def _perf_tsc_khz() -> int | None:
    """From the conversion factors of a perf event's user page: ns = cycles * mult >> shift."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = bytearray(128)
    struct.pack_into("<IIQ", attributes, 0, _PERF_TYPE_SOFTWARE, len(attributes), _PERF_COUNT_SW_DUMMY)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    fd = libc.syscall(_SYS_PERF_EVENT_OPEN, buffer, 0, -1, -1, 8)  # this process, any CPU, no group, CLOEXEC
    if fd < 0:
        return None
    try:
        with mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as page:
            (capabilities,) = struct.unpack_from("<Q", page, 40)
            shift, multiplier = struct.unpack_from("<HI", page, 50)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not capabilities & _PERF_CAP_USER_TIME or multiplier == 0:
        return None
    khz: int = round((1_000_000 << shift) / multiplier)
    return khz


def _cpu_identity(cpuinfo: str) -> str:
    """Family, model, stepping and a hash of the feature flags, for `-cpu host`."""
    fields = dict(re.findall(r"^([a-z _]+?)\s*:\s*(.*)$", cpuinfo, re.MULTILINE))
    flags = " ".join(sorted(fields.get("flags", "").split()))
    parts = [fields.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping")]
    return "-".join(parts) + "-" + hashlib.sha256(flags.encode()).hexdigest()[:12]


def _has_io_uring() -> bool:
    """Whether a ring can be made: the kernel may lack it, a sysctl or a seccomp filter may forbid it."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    fd = libc.syscall(_SYS_IO_URING_SETUP, 1, parameters)
    if fd < 0:
        return False
    os.close(fd)
    return True
