"""Starting a sandbox: create it, resume it from a durable pause, let a held one go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from agentenv.errors import AenvError, GuestError, StorageFull
from agentenv.lifecycle import Event
from agentenv.model import SandboxSpec, SnapshotManifest
from agentenv.node.owner import Owner, Work
from agentenv.node.placing import SavedMachine, displace, greet, place
from agentenv.snapshots import new_local_id

log = logging.getLogger(__name__)

GENERATION_COUNTER: Final = "generation"


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose a warm clone becomes."""

    spec: SandboxSpec
    alias: str | None


@dataclass(frozen=True, slots=True)
class ResumeParams:
    """How long the sandbox may run from the moment it is back."""

    timeout_s: float


async def start(owner: Owner, work: Work) -> Event:
    """Bring a new sandbox up. `work.params` is the snapshot to restore, or None for a boot from the kernel.

    A start that fails leaves nothing but a tombstone: START_FAILED leads to the teardown.
    """
    try:
        async with owner.host.admission.start(owner.record.resources):
            await _place_from(owner, work.params)
    except AenvError as error:
        owner.condemn("create_failed", str(error))
        work.reject(error)
        return Event.START_FAILED
    work.resolve()
    return Event.STARTED


async def warm_up(owner: Owner, work: Work) -> Event:
    """Restore a clone that is nobody's yet, let it answer and run a shell once, and halt it.

    The first answer and the first command are what a fresh process pays for (TCG translates everything anew).
    """
    try:
        async with owner.host.admission.start(owner.record.resources):
            await _place_from(owner, work.params)
            assert owner.slot is not None
            assert owner.vmm is not None
            token = owner.host.tokens.envd(owner.sandbox_id)
            await owner.host.guest.warm_up(owner.slot.address, 1, token)
            await owner.vmm.stop()
        # It was greeted as nobody's; whoever claims it is told everything.
        owner.update(greeted=False)
    except AenvError as error:
        owner.condemn("create_failed", str(error))
        work.reject(error)
        return Event.START_FAILED
    work.resolve()
    return Event.WARMED


async def personalise(owner: Owner, work: Work) -> Event:
    """Make a warm clone somebody's: policy, clock, identity, environment. `work.params` is the `Claim`."""
    claim: Claim = work.params
    vmm, slot = owner.vmm, owner.slot
    assert vmm is not None
    assert slot is not None
    now = owner.host.clock.wall()
    try:
        policy_before = owner.record.spec.network
        owner.update(spec=claim.spec, alias=claim.alias, started_at=now, end_at=now + claim.spec.timeout_s)
        if claim.spec.network != policy_before:
            await owner.host.slots.set_policy(slot, claim.spec.network)
        await vmm.cont()
        await greet(owner)
    except AenvError as error:
        owner.condemn("create_failed", str(error))
        work.reject(error)
        return Event.START_FAILED
    work.resolve()
    return Event.STARTED


async def restore(owner: Owner, work: Work) -> Event:
    """Resume from the durable pause. The pause stays as it is until the guest has answered."""
    host, pause = owner.host, owner.record.pause
    assert pause is not None
    try:
        # The resumed sandbox relies on these blobs after the pause's record is gone.
        await host.layers.hold_snapshot(pause)
        owner.update(
            disk=pause.disk,
            upper=new_local_id(),
            memory=pause.memory,
            captured_memory=None,
            generation=host.database.next_value(GENERATION_COUNTER),
            boot_id=host.boot_id,
        )
        async with host.admission.start(owner.record.resources):
            await _place_from(owner, pause)
        owner.update(pause=None, end_at=_end_after(owner, work))
    except AenvError as error:
        await finish_despite_cancel(_undo_restore(owner))
        work.reject(error)
        return Event.RESUME_UNDONE
    await forget_pause(owner, pause)
    work.resolve(True)
    return Event.RESUMED


async def continue_held(owner: Owner, work: Work) -> Event:
    """Let the held VMM go on over the same upper; what a capture wrote so far is dropped.

    While a durable pause stands behind it (the VMM lingered), any failure leads back to that pause.
    """
    host, vmm, pause = owner.host, owner.vmm, owner.record.pause
    assert vmm is not None
    await drop_capture(owner)
    try:
        owner.update(pending=None, generation=host.database.next_value(GENERATION_COUNTER))
        await vmm.cont()
        await greet(owner)
        owner.update(end_at=_end_after(owner, work), pause=None)
    except (GuestError, StorageFull) as error:
        await vmm.stop()
        work.reject(error)
        return Event.RESUME_UNDONE
    except AenvError as error:
        if pause is not None:
            work.reject(error)
            return Event.RESUME_UNDONE
        owner.condemn("resume_failed", str(error))
        work.reject(error)
        return Event.SOURCE_LOST
    if pause is not None:
        await forget_pause(owner, pause)
    host.collect_soon()
    work.resolve(True)
    return Event.RESUMED


async def drop_capture(owner: Owner) -> None:
    """End blockd's capture of a pause, if one runs. Failing to is harmless: its file is collected later."""
    job, owner.capture_job = owner.capture_job, None
    if job is not None:
        try:
            await owner.host.block.capture_cancel(job)
        except AenvError as error:
            log.warning("sandbox %s: capture %s was not cancelled: %s", owner.sandbox_id, job, error)


async def forget_pause(owner: Owner, pause: SnapshotManifest) -> None:
    """The pause has served: its record goes, and what only it needed is collected."""
    await owner.host.layers.drop_record(pause)
    owner.host.collect_soon()


async def _place_from(owner: Owner, manifest: SnapshotManifest | None) -> None:
    """Place the VM, restored from a snapshot, or booted (None). Raises `AenvError`."""
    if manifest is None:
        await place(owner, None)
        return
    async with owner.host.first_starts.of(manifest):
        state = await owner.host.layers.repository.state(manifest.device_state)
        await place(owner, SavedMachine(state, manifest.machine))


async def finish_despite_cancel(undo: Coroutine[Any, Any, None]) -> None:
    """Run an undo to its end even if the work is cancelled meanwhile; the cancellation follows afterwards."""
    task = asyncio.ensure_future(undo)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _end_after(owner: Owner, work: Work) -> float:
    """The end that the most generous of the joined requests asked for; set before the clock starts to run again."""
    timeouts = [request.params.timeout_s for request in work.requests]
    return owner.host.clock.wall() + max(timeouts, default=owner.record.spec.timeout_s)


async def _undo_restore(owner: Owner) -> None:
    await displace(owner)
    owner.host.paths.upper(owner.sandbox_id, owner.record.upper).unlink(missing_ok=True)
