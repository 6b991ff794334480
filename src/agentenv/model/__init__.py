"""Values that every other package shares: ids, resources, manifests, images, storage, tombstones. No behaviour, no I/O.

May be imported from everywhere and imports nothing of the package but `errors`.
"""

from agentenv.model.ids import (
    SANDBOX_ID_PATTERN,
    new_build_id,
    new_sandbox_id,
    new_snapshot_id,
)
from agentenv.model.image import (
    Dockerfile,
    ExportOptions,
    ImageInfo,
    ImageReference,
    ImageSource,
    Progress,
    Report,
)
from agentenv.model.image_config import DEFAULT_USER, image_environment, image_user, image_workdir
from agentenv.model.sandbox import (
    ExpiryAction,
    NetworkPolicy,
    SandboxSpec,
    SandboxState,
    SandboxView,
    Tombstone,
)
from agentenv.model.snapshot import (
    BLOB_DESCRIPTOR_SUFFIX,
    Blob,
    DiskStack,
    MachineFingerprint,
    MemoryStack,
    Resources,
    SnapshotKind,
    SnapshotManifest,
)
from agentenv.model.storage import Damage, GcReport, StorageReport, TierUnavailable, TierUsage, VerifyReport

__all__ = [
    "BLOB_DESCRIPTOR_SUFFIX",
    "DEFAULT_USER",
    "SANDBOX_ID_PATTERN",
    "Blob",
    "Damage",
    "DiskStack",
    "Dockerfile",
    "ExpiryAction",
    "ExportOptions",
    "GcReport",
    "ImageInfo",
    "ImageReference",
    "ImageSource",
    "MachineFingerprint",
    "MemoryStack",
    "NetworkPolicy",
    "Progress",
    "Report",
    "Resources",
    "SandboxSpec",
    "SandboxState",
    "SandboxView",
    "SnapshotKind",
    "SnapshotManifest",
    "StorageReport",
    "TierUnavailable",
    "TierUsage",
    "Tombstone",
    "VerifyReport",
    "image_environment",
    "image_user",
    "image_workdir",
    "new_build_id",
    "new_sandbox_id",
    "new_snapshot_id",
]
