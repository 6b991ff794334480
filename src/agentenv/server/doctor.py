"""What this host has and lacks for running sandboxes, as data; `aenv doctor` prints it.

Owns the list of checks. Each is independent and never raises; the one that starts a guest comes last, since it takes
seconds the first time.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.config import Config
from agentenv.errors import AenvError
from agentenv.server.compose import make_directories, prepare, probe_inputs
from agentenv.vmm.probe import choose_driver

BINARIES: Final = ("aenv-blockd", "aenv-proxy", "aenv-launch", "aenv-envd")
PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "nft": "nftables",
    "ip": "iproute2",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
}
KERNEL_MIN: Final = (6, 8)
KERNEL_RESEND: Final = (6, 9)
DISK_FREE_GIB_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: "ok", "warning" (it runs, something is lost) or "missing" (it does not run)."""

    name: str
    verdict: str
    detail: str


def host_findings(config: Config) -> list[Finding]:
    """Everything that can be seen without starting anything."""
    checks: tuple[Callable[[Config], Finding], ...] = (
        _root,
        _kernel,
        _fuse,
        _tun,
        _programs,
        _binaries,
        _disk,
        _cgroups,
    )
    return [check(config) for check in checks]


async def virtualization_finding(config: Config) -> Finding:
    """Start a tiny guest with each candidate (or read what an earlier start found) and say which is used and why."""
    try:
        make_directories(config)
        driver, report = await choose_driver(probe_inputs(config, prepare(config)))
    except AenvError as error:
        return Finding("virtualization", "missing", str(error))
    verdict = "ok" if driver.accelerator == "kvm" else "warning"
    return Finding("virtualization", verdict, f"{driver.name} + {driver.accelerator}\n{report.explain()}")


def _root(_: Config) -> Finding:
    if os.geteuid() == 0:
        return Finding("root", "ok", "running as root")
    return Finding("root", "missing", "the server makes namespaces, mounts and tap devices: run it as root")


def _kernel(_: Config) -> Finding:
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < KERNEL_MIN:
        return Finding("kernel", "missing", f"Linux {release}; 6.8 or newer is needed (PAGEMAP_SCAN, FUSE)")
    if version < KERNEL_RESEND:
        lost = "requests in flight are lost when blockd dies (FUSE_NOTIFY_RESEND came with 6.9)"
        return Finding("kernel", "warning", f"Linux {release}; {lost}")
    return Finding("kernel", "ok", f"Linux {release}")


def _fuse(_: Config) -> Finding:
    return _device("/dev/fuse", "modprobe fuse; in a container, pass the device in")


def _tun(_: Config) -> Finding:
    return _device("/dev/net/tun", "modprobe tun; in a container, pass the device in")


def _device(path: str, help_text: str) -> Finding:
    if os.access(path, os.R_OK | os.W_OK):
        return Finding(path, "ok", "can be opened")
    return Finding(path, "missing", f"does not exist or cannot be opened: {help_text}")


def _programs(_: Config) -> Finding:
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        return Finding("programs", "missing", f"apt-get install {' '.join(missing)}")
    return Finding("programs", "ok", ", ".join(PROGRAMS))


def _binaries(config: Config) -> Finding:
    bin_dir = config.server.bin_dir
    missing = [name for name in BINARIES if not os.access(bin_dir / name, os.X_OK)]
    if missing:
        return Finding(
            "binaries", "missing", f"{bin_dir} lacks {', '.join(missing)}: `make setup`, or set server.bin_dir"
        )
    return Finding("binaries", "ok", str(bin_dir))


def _disk(config: Config) -> Finding:
    existing = next(path for path in (config.server.state_dir, *config.server.state_dir.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / (1 << 30)
    verdict = "ok" if free_gib >= DISK_FREE_GIB_MIN else "warning"
    return Finding(
        "disk", verdict, f"{free_gib:.1f} GiB free below {existing} (at least {DISK_FREE_GIB_MIN} is advised)"
    )


def _cgroups(_: Config) -> Finding:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    available = controllers.read_text().split() if controllers.exists() else []
    if {"cpu", "memory"} <= set(available):
        return Finding("cgroup v2", "ok", "cpu and memory controllers are available")
    return Finding("cgroup v2", "warning", "no cpu and memory controllers in v2: VMMs are not limited by cgroups")
