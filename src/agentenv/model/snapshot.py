"""What a snapshot is: a disk stack, a memory stack and a device state of one instant, and what restoring it needs.

A template is a snapshot with names. A durable pause is a snapshot that belongs to one sandbox.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Resources:
    """What the guest sees. Units are in the names."""

    cpu_count: int
    memory_mib: int
    disk_mib: int


@dataclass(frozen=True, slots=True)
class DiskStack:
    """Read-only layers of a disk, bottom first, by layer id."""

    size_bytes: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryStack:
    """Read-only layers of a memory image, bottom first, by layer id.

    `image_id` names the exported inode that clones map: it never changes its content, so equal ids mean shared pages.
    """

    image_id: str
    size_bytes: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MachineFingerprint:
    """What must be equal for a device state to load: a restore on anything else is refused, never tried.

    QEMU's own check is switched off (`send-configuration=off`), so this record replaces it.
    """

    driver: str
    accelerator: str
    vmm_build: str
    cpu_model: str
    kernel: str
    tsc_khz: int
    command_hash: str


class SnapshotKind(enum.StrEnum):
    """Why a snapshot exists, which decides when it may be collected."""

    TEMPLATE = "template"
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    FORK = "fork"


# Ends the name of the file that stands for a blob which is no plain file of this node (STATE/blobs/<digest>.blob).
BLOB_DESCRIPTOR_SUFFIX: Final = ".blob"


@dataclass(frozen=True, slots=True)
class Blob:
    """An immutable object of the repository, named by the sha256 (64 hex digits) of its stored bytes.

    "plain" is what it is before compression and encryption: the canonical bytes of a layer, the bytes of a state.
    """

    digest: str
    size_bytes: int
    plain_digest: str
    plain_size_bytes: int
    # sha256 of the list of block digests that lies beside a blob in a remote store; None where there is no list.
    blocks_digest: str | None = None
    encryption: str | None = None
    compression: str | None = None
    # Where its bytes are, if not in the repository: a layer that a registry serves (the "source" of a descriptor).
    origin: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """The record of one committed snapshot; its appearance in the repository is the commit."""

    snapshot_id: str
    kind: SnapshotKind
    created_at: float
    resources: Resources
    disk: DiskStack
    memory: MemoryStack
    device_state: str
    machine: MachineFingerprint
    # The sandbox whose derived token the guest daemon holds in this memory image; "" where none was set yet.
    token_owner: str
    # The sandbox that the snapshot was taken of and the template it began from; "" for a template's own build.
    source_sandbox_id: str = ""
    template_id: str = ""
    names: tuple[str, ...] = ()
    build_id: str = ""
    env_vars: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    # Every blob that `disk`, `memory` and `device_state` name, by digest; version 1 records name plain files instead.
    blobs: dict[str, Blob] = field(default_factory=dict)
    # The snapshot from which the source began: lineage for people, never needed to restore.
    parent_snapshot_id: str = ""
    # The token that `token_owner` stands for: another node's secret does not derive it. No more secret than the memory
    # image, which holds it too.
    guest_token: str = ""
    # The node that committed it; "" in version 1, where a repository belonged to one node.
    node_id: str = ""
    # The configuration of the OCI image that the disk came from (Env, WorkingDir, User, Entrypoint, ...), as it was.
    image_config: dict[str, Any] = field(default_factory=dict)
