"""Values that every other package shares: ids, resources, manifests, tombstones. No behaviour, no I/O.

May be imported from everywhere and imports nothing of the package but `errors`.
"""

from agentenv.model.ids import (
    SANDBOX_ID_PATTERN,
    new_build_id,
    new_sandbox_id,
    new_snapshot_id,
)
from agentenv.model.sandbox import (
    ExpiryAction,
    NetworkPolicy,
    SandboxSpec,
    SandboxState,
    SandboxView,
    Tombstone,
)
from agentenv.model.snapshot import (
    DiskStack,
    MachineFingerprint,
    MemoryStack,
    Resources,
    SnapshotKind,
    SnapshotManifest,
)

__all__ = [
    "SANDBOX_ID_PATTERN",
    "DiskStack",
    "ExpiryAction",
    "MachineFingerprint",
    "MemoryStack",
    "NetworkPolicy",
    "Resources",
    "SandboxSpec",
    "SandboxState",
    "SandboxView",
    "SnapshotKind",
    "SnapshotManifest",
    "Tombstone",
    "new_build_id",
    "new_sandbox_id",
    "new_snapshot_id",
]
