"""Pausing: hold, capture, commit, release. See ARCHITECTURE.md, "One pause".

hold      VMM stopped, device state saved, room for the memory layer reserved: the pause can be answered
capture   blockd reads the stopped VMM's dirty pages into a layer; beside it the disk is fsynced
commit    the upper is sealed, everything fsynced, the record written: power may go
linger    the halted VMM is kept a few seconds more, since a resume by it takes milliseconds
release   the VMM is killed, its memory and slot given back
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from agentenv.errors import AenvError, OperationFailed, VmmGone
from agentenv.lifecycle import Event
from agentenv.model import DiskStack, MemoryStack, SnapshotKind, SnapshotManifest, new_snapshot_id
from agentenv.node.capturing import check_room, seal_upper, start_capture
from agentenv.node.owner import Owner, Work
from agentenv.node.placing import displace, held_token
from agentenv.node.record import PendingCapture
from agentenv.node.starting import drop_capture
from agentenv.snapshots import new_local_id

log = logging.getLogger(__name__)

CAPTURE_RETRY_S: Final = 10.0
# Private layers above a template's own after which a pause merges them: each costs a file and index entries.
CHAIN_LENGTH_MAX: Final = 16


async def hold(owner: Owner, work: Work) -> Event:
    """Stop the VMM and make sure that the pause can be finished. A failure lets the guest go on."""
    host, vmm = owner.host, owner.vmm
    assert vmm is not None
    pending = PendingCapture(memory_layer=new_local_id(), device_state=new_local_id())
    try:
        check_room(owner)
        owner.update(pending=pending)
        await vmm.stop()
        await vmm.save_device_state(host.layers.staging.state(pending.device_state))
        await _start_capture(owner)
    except AenvError as error:
        return await _undo_hold(owner, work, error)
    await host.proxy.withdraw([owner.record.generation])
    work.resolve()
    return Event.HELD


async def capture(owner: Owner, work: Work) -> Event:
    """Write the memory layer and fsync the disk. Cancelled by a resume or a kill."""
    host, record = owner.host, owner.record
    try:
        if owner.capture_job is None:
            await _start_capture_anew(owner)
        job = owner.capture_job
        assert job is not None
        upper = str(host.paths.upper(record.sandbox_id, record.upper))
        await asyncio.gather(host.block.capture_finish(job), host.block.sync([upper]))
    except AenvError as error:
        log.warning("sandbox %s stays held, its capture failed: %s", owner.sandbox_id, error)
        await drop_capture(owner)
        return Event.CAPTURE_FAILED
    owner.capture_job = None
    return Event.CAPTURED


async def commit_pause(owner: Owner, work: Work) -> Event:
    """Seal the disk and make the pause durable."""
    manifest: SnapshotManifest | None = None
    layers = owner.host.layers
    try:
        await seal_upper(owner)
        ids = (new_local_id(), new_local_id())
        with layers.reserved(*ids):
            disk, memory = await _shortened(owner, ids)
            manifest = await layers.publish(_pause_manifest(owner, disk, memory))
            manifest = await layers.repository.commit(manifest)
            # The VMM may go on after all: its next capture stores what differs from this one.
            owner.update_durably(pause=manifest, pending=None, captured_memory=memory)
    except AenvError as error:
        log.warning("sandbox %s stays held, its pause cannot be committed: %s", owner.sandbox_id, error)
        if manifest is not None:
            await layers.drop_record(manifest)
        return Event.COMMIT_FAILED
    return Event.COMMITTED


async def linger(owner: Owner, work: Work) -> Event:
    """Keep the halted VMM for a moment after the pause is durable, where memory allows. Cancelled by a resume."""
    host = owner.host
    await asyncio.sleep(host.pause_linger_s if host.admission.has_memory_to_spare() else 0.0)
    return Event.LINGERED


async def release_vmm(owner: Owner, work: Work) -> None:
    """The pause is durable: give memory, process and slot back. Repeats until blockd and the network agree."""
    while True:
        try:
            await displace(owner)
            break
        except AenvError as error:
            log.warning("sandbox %s: its VM is not released yet: %s", owner.sandbox_id, error)
            await asyncio.sleep(1)
    directory = owner.host.paths.sandbox_dir(owner.sandbox_id)
    for leftover in directory.glob("*"):
        leftover.unlink(missing_ok=True)
    pause = owner.record.pause
    assert pause is not None
    # From here on the repository alone holds it, and the local copies may go.
    owner.update(upper="", disk=pause.disk, memory=pause.memory, captured_memory=None)
    owner.host.collect_soon()


async def retry_capture_later(owner: Owner, work: Work) -> Event:
    """Wait, then try the capture again. Cancelled by a resume or a kill."""
    await asyncio.sleep(CAPTURE_RETRY_S)
    return Event.RETRY_DUE


async def _start_capture_anew(owner: Owner) -> None:
    """After a failure, or for a former server's pause: blockd may still run its capture, or have finished it.

    A new layer id in any case, since a layer's file is never written twice.
    """
    pending = owner.record.pending
    if pending is None:
        raise OperationFailed(f"sandbox {owner.sandbox_id} has no pause to finish")
    await owner.host.block.capture_cancel(_job_name(owner, pending))
    owner.update(pending=replace(pending, memory_layer=new_local_id()))
    await _start_capture(owner)


def _job_name(owner: Owner, pending: PendingCapture) -> str:
    return f"{owner.sandbox_id}-{pending.memory_layer}"


async def _start_capture(owner: Owner) -> None:
    pending = owner.record.pending
    if pending is None:
        raise OperationFailed(f"sandbox {owner.sandbox_id} has no pause to finish")
    job = _job_name(owner, pending)
    below = await start_capture(owner, job, pending.memory_layer, "process")
    owner.capture_job = job
    owner.update(pending=replace(pending, below=below))


async def _undo_hold(owner: Owner, work: Work, error: AenvError) -> Event:
    """The pause cannot be done: let the guest go on and say why. Its streams were never touched."""
    await drop_capture(owner)
    assert owner.vmm is not None
    try:
        await owner.vmm.cont()
    except AenvError as lost:
        owner.condemn("vmm_died", f"after a failed pause ({error}) the VMM did not go on: {lost}")
        work.reject(error if not isinstance(lost, VmmGone) else lost)
        return Event.SOURCE_LOST
    pending = owner.record.pending
    if pending is not None:
        owner.host.layers.staging.state(pending.device_state).unlink(missing_ok=True)
    # In memory only: the disk may be full, and the phase change that follows stores it if it can.
    owner.record = replace(owner.record, pending=None)
    work.reject(error)
    return Event.PAUSE_UNDONE


async def _shortened(owner: Owner, ids: tuple[str, str]) -> tuple[DiskStack, MemoryStack]:
    """The stacks of the pause, their private parts merged into one layer where they have become long."""
    record = owner.record
    assert record.pending is not None
    below = record.pending.below or record.memory
    disk, memory = record.disk.layers, (*below.layers, record.pending.memory_layer)
    if len(disk) - record.shared_disk_layers > CHAIN_LENGTH_MAX:
        disk = await _merge(owner, disk, record.shared_disk_layers, ids[0])
    if len(memory) - record.shared_memory_layers > CHAIN_LENGTH_MAX:
        memory = await _merge(owner, memory, record.shared_memory_layers, ids[1])
    image = record.pending.memory_layer
    return DiskStack(record.disk.size_bytes, disk), MemoryStack(image, record.memory.size_bytes, memory)


async def _merge(owner: Owner, layers: tuple[str, ...], shared: int, into: str) -> tuple[str, ...]:
    source = owner.host.layers.paths(layers[shared:])
    await owner.host.block.merge(source, owner.host.layers.local_path(into))
    return (*layers[:shared], into)


def _pause_manifest(owner: Owner, disk: DiskStack, memory: MemoryStack) -> SnapshotManifest:
    record = owner.record
    assert record.pending is not None
    assert record.vmm is not None
    return SnapshotManifest(
        snapshot_id=new_snapshot_id(),
        kind=SnapshotKind.PAUSE,
        created_at=owner.host.clock.wall(),
        resources=record.resources,
        disk=disk,
        memory=memory,
        device_state=record.pending.device_state,
        machine=record.vmm.fingerprint,
        token_owner=record.token_owner,
        guest_token=held_token(owner),
        source_sandbox_id=record.sandbox_id,
        template_id=record.template_id,
        parent_snapshot_id=record.template_id,
        image_config=record.image_config,
    )
