"""Records of new sandboxes: of a disk that is booted, and of a snapshot that is restored. Values only."""

from __future__ import annotations

from dataclasses import replace

from agentenv.lifecycle import Phase
from agentenv.model import (
    DiskStack,
    MemoryStack,
    Resources,
    SandboxSpec,
    SnapshotKind,
    SnapshotManifest,
    new_sandbox_id,
)
from agentenv.node.host import Host
from agentenv.node.record import SandboxRecord
from agentenv.node.starting import GENERATION_COUNTER
from agentenv.snapshots import new_local_id


def new_record(
    host: Host, spec: SandboxSpec, resources: Resources, disk: DiskStack, memory: MemoryStack
) -> SandboxRecord:
    """A sandbox over a disk and a memory image, with a generation of its own. Not stored yet."""
    now = host.clock.wall()
    return SandboxRecord(
        sandbox_id=new_sandbox_id(),
        phase=Phase.CREATING,
        spec=spec,
        template_id="",
        alias=None,
        resources=resources,
        started_at=now,
        end_at=now + spec.timeout_s,
        generation=host.database.next_value(GENERATION_COUNTER),
        token_owner="",
        disk=disk,
        upper=new_local_id(),
        memory=memory,
        shared_disk_layers=len(disk.layers),
        shared_memory_layers=len(memory.layers),
        boot_id=host.boot_id,
    )


def record_of_snapshot(
    host: Host, spec: SandboxSpec, manifest: SnapshotManifest, phase: Phase = Phase.CREATING
) -> SandboxRecord:
    """A sandbox that is to be restored from a snapshot."""
    record = new_record(host, spec, manifest.resources, manifest.disk, manifest.memory)
    return replace(
        record,
        phase=phase,
        template_id=manifest.template_id if manifest.kind is SnapshotKind.FORK else manifest.snapshot_id,
        alias=alias_of(host, manifest),
        token_owner=manifest.token_owner,
        guest_token=manifest.guest_token,
        image_config=manifest.image_config,
        restoring=manifest.device_state,
    )


def alias_of(host: Host, manifest: SnapshotManifest) -> str | None:
    """The first name that the snapshot still owns, as clients are told it."""
    names = host.catalog.names_of(manifest)
    return names[0].removesuffix(":default") if names else None
