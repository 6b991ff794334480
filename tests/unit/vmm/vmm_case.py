"""A machine spec for tests that start nothing."""

from __future__ import annotations

from pathlib import Path

from agentenv.model import Resources
from agentenv.vmm import GuestKernel, MachineFiles, MachineSpec, NetworkAttachment


def spec(folder: str = "/run/aenv/x", machine_id: str = "sb1", *, memory_mib: int = 512, cpus: int = 2) -> MachineSpec:
    root = Path(folder)
    return MachineSpec(
        machine_id,
        Resources(cpus, memory_mib, 1024),
        GuestKernel(root / "vmlinux", root / "initramfs", "6.12.9-abc"),
        MachineFiles(root / "memory", root / "disk", root / "run"),
        NetworkAttachment(
            f"ns-{machine_id}",
            f"tap-{machine_id}",
            "02:ae:00:00:00:02",
            "10.11.0.2/30",
            "10.11.0.1",
            ("1.1.1.1", "8.8.8.8"),
            "02:ae:00:00:00:01",
        ),
    )
