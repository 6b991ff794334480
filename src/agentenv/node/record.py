"""The stored truth about one sandbox: what it is, where it is in its lifecycle, and everything that it holds.

A record is a value; the owner task replaces it and the database keeps the newest. Whatever a sandbox holds outside the
server (VMM process, network slot, exports, layers) is named here *before* it is used, so that a server that was killed
at any instruction finds all of it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentenv.lifecycle import Phase
from agentenv.model import (
    DiskStack,
    MemoryStack,
    Resources,
    SandboxSpec,
    SnapshotManifest,
)
from agentenv.snapshots import ids_of
from agentenv.vmm import VmmRecord


@dataclass(frozen=True, slots=True)
class PendingCapture:
    """The ids under which a pause in progress writes its memory layer and device state."""

    memory_layer: str
    device_state: str
    # What the memory layer will lie upon: the mapped image, or the last capture of this VMM run.
    below: MemoryStack | None = None


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """One row of the node's database."""

    sandbox_id: str
    phase: Phase
    spec: SandboxSpec
    template_id: str
    alias: str | None
    resources: Resources
    started_at: float
    end_at: float
    # The run of the VMM that streams belong to; 0 before the first.
    generation: int
    # The sandbox whose derived token the guest's daemon holds at the moment; "" for none.
    token_owner: str
    # Sealed layers under the upper, bottom first; then the upper that the guest writes ("" while no export exists).
    disk: DiskStack
    upper: str
    # The image that the VMM maps. Its dirty pages are relative to this, whatever was captured since.
    memory: MemoryStack
    # The last captured image of this VMM run; a later capture stores only what differs from it.
    captured_memory: MemoryStack | None = None
    # How many layers at the bottom of each stack came with the template: they are shared and never merged.
    shared_disk_layers: int = 0
    shared_memory_layers: int = 0
    # The token that the guest holds from a snapshot of another node, whose secret this one does not know; else "".
    guest_token: str = ""
    # The configuration of the OCI image that the disk came from: whose user, directory and environment it has.
    image_config: dict[str, Any] = field(default_factory=dict)
    # Whether the guest has been made this sandbox; a resume then only sets its clock and reseeds it.
    greeted: bool = False
    # The device state that a start still has to load; "" once it has.
    restoring: str = ""
    vmm: VmmRecord | None = None
    slot: int | None = None
    # The host's boot in which the VMM was started; another one means that the machine went down.
    boot_id: str = ""
    pending: PendingCapture | None = None
    # The durable pause, present exactly while paused (and while a restore from it is being tried).
    pause: SnapshotManifest | None = None

    @property
    def disk_export(self) -> str:
        return disk_export_name(self.sandbox_id)

    def layer_ids(self) -> set[str]:
        """Every layer and device state that must not be collected while this record exists."""
        ids = {*self.disk.layers, *self.memory.layers}
        if self.restoring:
            ids.add(self.restoring)
        if self.captured_memory is not None:
            ids.update(self.captured_memory.layers)
        if self.pending is not None:
            ids.update((self.pending.memory_layer, self.pending.device_state))
            ids.update(self.pending.below.layers if self.pending.below is not None else ())
        if self.pause is not None:
            ids.update(ids_of(self.pause))
        return ids


def disk_export_name(sandbox_id: str) -> str:
    """blockd's name of a sandbox's disk."""
    return f"d-{sandbox_id}"


def memory_export_name(image_id: str) -> str:
    """blockd's name of a memory image; all clones of one image map this one inode."""
    return f"m-{image_id}"
