"""Branching: snapshots and forks of a sandbox. The source stands still only between `stop` and `cont`.

stop -> device state -> seal the disk -> copy the dirty pages into blockd's memory -> cont
afterwards, beside the running source: the copied pages become a layer, all is fsynced, the record appears
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from agentenv.errors import AenvError, OperationFailed
from agentenv.lifecycle import Event
from agentenv.model import DiskStack, MemoryStack, SnapshotKind, SnapshotManifest, new_build_id, new_snapshot_id
from agentenv.node.capturing import check_room, seal_upper, start_capture
from agentenv.node.interface import SnapshotResult
from agentenv.node.owner import Owner, Work
from agentenv.node.placing import held_token
from agentenv.snapshots import ids_of, new_local_id

# A guest under emulation writes some 80 MB a second, and may hold hundreds of dirty ones.
FREEZE_S_MAX: Final = 300.0


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """One instant of a sandbox, complete but not yet durable. Its layers are reserved by whoever made it."""

    manifest: SnapshotManifest
    frozen_s: float


@dataclass(frozen=True, slots=True)
class SnapshotParams:
    """What a snapshot is to be called and to serve as."""

    kind: SnapshotKind
    names: tuple[str, ...] = ()


class SourceLost(OperationFailed):
    """The source did not go on after the capture, or its VMM died in it."""


async def take_snapshot(owner: Owner, work: Work) -> Event:
    """Capture, make durable, commit. The source runs again long before this ends."""
    params: SnapshotParams = work.params
    try:
        async with _branch(owner, params) as point:
            manifest = await commit(owner, point.manifest)
            work.resolve(SnapshotResult(manifest, point.frozen_s))
    except AenvError as error:
        return _failed(owner, work, error, Event.SNAPSHOT_ENDED)
    return Event.SNAPSHOT_ENDED


async def take_fork(owner: Owner, work: Work) -> Event:
    """Capture only: the children need the layers in place, not on the disk. The answer is a `BranchPoint`.

    Its layers stay reserved; the requester unreserves them (`release`) once the children's records name them.
    """
    try:
        async with _branch(owner, SnapshotParams(SnapshotKind.FORK)) as point:
            if work.requests[0].done.done():
                raise OperationFailed("the fork's requester has gone away")
            owner.host.layers.reserve(*ids_of(point.manifest))
            work.resolve(point)
    except AenvError as error:
        return _failed(owner, work, error, Event.FORK_ENDED)
    return Event.FORK_ENDED


def _failed(owner: Owner, work: Work, error: AenvError, ended: Event) -> Event:
    """Tell the requester; the outcome is `ended` unless the source itself was lost."""
    work.reject(error)
    if isinstance(error, SourceLost):
        owner.condemn("vmm_died", str(error))
        return Event.SOURCE_LOST
    owner.host.collect_soon()
    return ended


async def frozen_branch(owner: Owner) -> BranchPoint:
    """A branch point whose disk alone is complete: the guest has written out its file systems and stands still on them.

    The guest cannot go on from here, and its owner is to end. The caller releases the layers. Raises `AenvError`.
    """
    assert owner.slot is not None
    await owner.host.guest.freeze_disk(owner.slot.address, held_token(owner), FREEZE_S_MAX)
    point: BranchPoint = await owner.ask(Event.FORK)
    return point


async def copy_pause(owner: Owner, work: Work) -> None:
    """A snapshot of a durable pause is a second record over the same layers."""
    params: SnapshotParams = work.params
    pause = owner.record.pause
    assert pause is not None
    manifest = _described(owner, replace(pause, snapshot_id=new_snapshot_id()), params)
    try:
        manifest = await owner.host.layers.repository.commit(manifest)
    except AenvError as error:
        work.reject(error)
        return
    owner.host.commit_to_catalog(manifest)
    work.resolve(SnapshotResult(manifest, 0.0))


async def commit(owner: Owner, manifest: SnapshotManifest) -> SnapshotManifest:
    """Make a branch point durable and visible: layers first, the record last. Returns it as it was committed."""
    layers = owner.host.layers
    published = await layers.repository.commit(await layers.publish(manifest))
    owner.host.commit_to_catalog(published)
    return published


@asynccontextmanager
async def _branch(owner: Owner, params: SnapshotParams) -> AsyncIterator[BranchPoint]:
    """Freeze, copy, let go on, write the memory layer. The new layers are reserved while the context is open."""
    host = owner.host
    memory_layer, state = new_local_id(), new_local_id()
    ids = [memory_layer, state]
    host.layers.reserve(*ids)
    job = f"{owner.sandbox_id}-{memory_layer}"
    try:
        disk, below, frozen_s = await _freeze(owner, job, memory_layer, state)
        host.layers.reserve(disk.layers[-1])
        ids.append(disk.layers[-1])
        memory = MemoryStack(memory_layer, below.size_bytes, (*below.layers, memory_layer))
        await host.block.capture_finish(job)
        owner.update(captured_memory=memory)
        yield BranchPoint(_manifest(owner, disk, memory, state, params), frozen_s)
    except BaseException:
        await _drop_job(owner, job)
        raise
    finally:
        host.layers.release(*ids)


async def _freeze(owner: Owner, job: str, memory_layer: str, state: str) -> tuple[DiskStack, MemoryStack, float]:
    """Everything that must be of one instant.

    Returns the sealed disk, what the memory layer will lie upon, and for how many seconds the source stood.
    """
    host, vmm = owner.host, owner.vmm
    assert vmm is not None
    check_room(owner)
    started = host.clock.monotonic()
    try:
        await vmm.stop()
        await vmm.save_device_state(host.layers.staging.state(state))
        await seal_upper(owner)
        disk = owner.record.disk
        below = await start_capture(owner, job, memory_layer, "buffer")
    finally:
        await _go_on(owner)
    return disk, below, host.clock.monotonic() - started


async def _go_on(owner: Owner) -> None:
    """Let the source run again, also when the work is being cancelled. Raises `SourceLost`."""
    assert owner.vmm is not None
    try:
        await asyncio.shield(owner.vmm.cont())
    except AenvError as error:
        raise SourceLost(f"sandbox {owner.sandbox_id} did not go on after its capture: {error}") from error


async def _drop_job(owner: Owner, job: str) -> None:
    try:
        await owner.host.block.capture_cancel(job)
    except AenvError:
        # Not started, finished already, or blockd is new: either way nothing runs, and the file is collected.
        return


def _manifest(
    owner: Owner, disk: DiskStack, memory: MemoryStack, state: str, params: SnapshotParams
) -> SnapshotManifest:
    record = owner.record
    assert record.vmm is not None
    bare = SnapshotManifest(
        snapshot_id=new_snapshot_id(),
        kind=params.kind,
        created_at=0.0,
        resources=record.resources,
        disk=disk,
        memory=memory,
        device_state=state,
        machine=record.vmm.fingerprint,
        token_owner=record.token_owner,
        guest_token=held_token(owner),
        parent_snapshot_id=record.template_id,
        image_config=record.image_config,
    )
    return _described(owner, bare, params)


def _described(owner: Owner, manifest: SnapshotManifest, params: SnapshotParams) -> SnapshotManifest:
    record = owner.record
    return replace(
        manifest,
        kind=params.kind,
        names=params.names,
        created_at=owner.host.clock.wall(),
        source_sandbox_id=record.sandbox_id,
        template_id=record.template_id,
        build_id=new_build_id(),
        env_vars=record.spec.env_vars,
        metadata=record.spec.metadata,
    )
