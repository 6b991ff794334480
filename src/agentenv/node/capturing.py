"""The two halves of a capture that pauses and branches share: sealing the disk, and finding the dirty memory.

Both must happen while the VMM is stopped, in this order, after its device state was saved.
"""

from __future__ import annotations

import shutil
from typing import Final, Literal

from agentenv.errors import OperationFailed, StorageFull
from agentenv.model import DiskStack, MemoryStack
from agentenv.node.owner import Owner
from agentenv.node.record import memory_export_name
from agentenv.snapshots import new_local_id

# After so many captures of one VMM run on top of each other, the next one is written whole again.
CAPTURE_CHAIN_LENGTH_MAX: Final = 8
# A device state, an index and the database's own pages; the pages of memory come on top.
CAPTURE_ROOM_MIB_MIN: Final = 8


async def seal_upper(owner: Owner) -> str:
    """Turn the upper into a sealed layer under a new upper; the record follows. Returns the sealed layer's id."""
    host, record = owner.host, owner.record
    sealed, fresh = record.upper, new_local_id()
    with host.layers.reserved(fresh):
        await host.block.seal_disk(record.disk_export, host.paths.upper(record.sandbox_id, fresh))
        host.layers.staging.adopt(host.paths.upper(record.sandbox_id, sealed), sealed)
        owner.update(disk=DiskStack(record.disk.size_bytes, (*record.disk.layers, sealed)), upper=fresh)
    return sealed


async def start_capture(owner: Owner, job: str, layer: str, hold: Literal["buffer", "process"]) -> MemoryStack:
    """Have blockd find (and, with "buffer", copy) the dirty pages; returns what the new layer will lie upon."""
    host, record, vmm = owner.host, owner.record, owner.vmm
    if vmm is None:
        raise OperationFailed(f"sandbox {owner.sandbox_id} holds no VMM to capture")
    mapping = await vmm.memory_mapping()
    base = _base(owner)
    started = await host.block.capture_start(
        job,
        pid=mapping.pid,
        address=mapping.address,
        length_bytes=mapping.length_bytes,
        parent=memory_export_name(record.memory.image_id),
        layer=host.layers.local_path(layer),
        hold=hold,
        base=host.layers.paths(base.layers) if base is not None else None,
    )
    return base if base is not None and started.based else record.memory


def check_room(owner: Owner) -> None:
    """Refuse before the VMM is stopped: on a full disk its writes wait in blockd, and a stop would wait for them.

    Raises `StorageFull`. What a capture really needs is reserved later; this only keeps the guest running meanwhile.
    """
    free_mib = shutil.disk_usage(owner.host.paths.state).free >> 20
    if free_mib < CAPTURE_ROOM_MIB_MIN:
        raise StorageFull(f"the node's disk is full ({free_mib} MiB free); the sandbox runs on")


def _base(owner: Owner) -> MemoryStack | None:
    """The last capture of this run, if the next may lie upon it: it must extend the mapped image, and not by much."""
    last, mapped = owner.record.captured_memory, owner.record.memory
    if last is None or last.layers[: len(mapped.layers)] != mapped.layers:
        return None
    return last if len(last.layers) - len(mapped.layers) < CAPTURE_CHAIN_LENGTH_MAX else None
