"""Virtual machine monitors: one driver interface, its drivers, and the probe that chooses one.

Imports `model`, `errors` and `config` values only; never `network`, `block`, `guest`, `snapshots` or `node`.
"""

from agentenv.vmm.driver import (
    GuestKernel,
    MachineFiles,
    MachineSpec,
    MemoryMapping,
    NetworkAttachment,
    Vmm,
    VmmDriver,
    VmmRecord,
)

__all__ = [
    "GuestKernel",
    "MachineFiles",
    "MachineSpec",
    "MemoryMapping",
    "NetworkAttachment",
    "Vmm",
    "VmmDriver",
    "VmmRecord",
]
