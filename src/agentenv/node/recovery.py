"""After a restart of the server: what became of each sandbox while nobody watched, and what to do about it.

`plan` is pure and total: every phase with every state of the VMM has an answer. The rest applies plans: adopt what
runs, finish or undo what was half done, and remove what nobody owns (VMM processes, exports, uppers, pause records).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agentenv.errors import AenvError, VmmGone
from agentenv.lifecycle import POOLED, Action, Event, Phase
from agentenv.model import DiskStack, SnapshotKind
from agentenv.node.host import Host
from agentenv.node.owner import Owner
from agentenv.node.record import SandboxRecord, disk_export_name, memory_export_name
from agentenv.processes import RecordedProcess, recorded
from agentenv.vmm import Vmm

log = logging.getLogger(__name__)

UNRECORDED_GONE_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with one record. `reason` is the tombstone's, where the sandbox ends."""

    phase: Phase
    actions: tuple[Action, ...] = ()
    # Halted virtual CPUs must go on: the server died between a stop and its cont.
    go_on: bool = False
    reason: str = ""
    detail: str = ""


_UNDONE: Final = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.SNAPSHOTTING, Phase.FORKING, Phase.RESUMING_HELD})
_DURABLE: Final = frozenset({Phase.LINGERING, Phase.PAUSED, Phase.RESUMING_LINGERED, Phase.RESUMING})
_HELD: Final = frozenset({Phase.HELD_CAPTURING, Phase.HELD_CAPTURED, Phase.HELD_WAITING})


def plan(phase: Phase, *, vmm_alive: bool, same_boot: bool, pause_committed: bool) -> Plan:
    """Decide by what is on disk and what is alive."""
    lost = "vmm_died" if same_boot else "host_lost"
    lost_detail = "its VMM ended while the server was down" if same_boot else "the host was restarted"
    if phase in {Phase.KILLING, Phase.GONE}:
        return Plan(Phase.KILLING, (Action.TEAR_DOWN,), reason="deleted")
    if phase in POOLED:
        return Plan(Phase.KILLING, (Action.TEAR_DOWN,), reason="deleted", detail="a warm clone of a former server")
    if phase is Phase.CREATING:
        return Plan(
            Phase.KILLING, (Action.TEAR_DOWN,), reason="create_failed", detail="the server stopped during its start"
        )
    if phase in _DURABLE or (phase in _HELD and pause_committed):
        # The durable pause is the truth; a VMM that still exists is a leftover of before or of a cut-short restore.
        return Plan(Phase.PAUSED, (Action.RELEASE_VMM,))
    if not vmm_alive:
        return Plan(Phase.KILLING, (Action.TEAR_DOWN,), reason=lost, detail=lost_detail)
    if phase in _HELD:
        return Plan(Phase.HELD_CAPTURING, (Action.CAPTURE,))
    assert phase in _UNDONE
    return Plan(Phase.RUNNING, go_on=True)


async def take_over(host: Host, add_owner: Callable[[SandboxRecord], Owner]) -> None:
    """Make an owner of every record and let it go on as planned. Call it once, before anything new starts."""
    records = [await _reconcile_disk(host, record) for record in host.database.load()]
    vmms = {record.sandbox_id: await _adopt_vmm(host, record) for record in records}
    await _remove_orphans(host, records)
    in_use = {record.slot for record in records if record.slot is not None and record.vmm is not None}
    slots = await host.slots.adopt(in_use)
    for record in records:
        vmm = vmms[record.sandbox_id]
        todo = _plan_for(host, record, vmm)
        owner = add_owner(replace(record, phase=todo.phase))
        owner.slot = slots.get(record.slot) if record.slot is not None else None
        if vmm is not None:
            owner.watch(vmm)
            owner.mapped = record.memory
            host.images.pin(record.memory.image_id)
        await _apply(owner, todo)


async def hold_anew(host: Host, records: Iterable[SandboxRecord]) -> None:
    """Take over the former server's holds. If the store is out they stay as they are, until the next start."""
    try:
        await host.layers.hold({layer for record in records for layer in record.layer_ids()})
    except AenvError as error:
        log.error("what the sandboxes need could not be held anew: %s", error)
    else:
        host.layers.repository.settle()


async def _apply(owner: Owner, todo: Plan) -> None:
    log.info("sandbox %s: found as %s, goes on as %s", owner.sandbox_id, owner.record.phase, todo.phase)
    if todo.reason:
        owner.condemn(todo.reason, todo.detail)
    try:
        if todo.go_on and owner.vmm is not None:
            await _let_go_on(owner.vmm)
            owner.update(pending=None)
    except AenvError as error:
        owner.condemn("vmm_died", f"the VMM did not answer after a restart of the server: {error}")
        owner.ask(Event.KILL)
        return
    if todo.actions:
        owner.adopt_work(Event.KILL if todo.reason else Event.PAUSE, todo.actions)
    owner.arm_timer()


async def _adopt_vmm(host: Host, record: SandboxRecord) -> Vmm | None:
    """The running VMM of a record, or None when its process is gone or of another boot."""
    if record.vmm is None or record.boot_id != host.boot_id:
        return None
    try:
        return await host.driver.adopt(record.vmm)
    except VmmGone:
        return None


def _plan_for(host: Host, record: SandboxRecord, vmm: Vmm | None) -> Plan:
    """`plan` with the facts of one record."""
    return plan(
        record.phase,
        vmm_alive=vmm is not None,
        same_boot=record.boot_id in ("", host.boot_id),
        pause_committed=record.pause is not None,
    )


async def _reconcile_disk(host: Host, record: SandboxRecord) -> SandboxRecord:
    """blockd's account of a disk is newer when the server died just after a seal: take it over."""
    exports = {export.name: export for export in await host.block.exports()}
    export = exports.get(record.disk_export)
    if export is None or record.vmm is None:
        return record
    layers = tuple(Path(path).stem for path in export.layers)
    upper = Path(export.upper).stem if export.upper else record.upper
    if layers == record.disk.layers and upper == record.upper:
        return record
    for path in map(Path, export.layers):
        if path.parent == host.paths.sandbox_dir(record.sandbox_id):
            host.layers.staging.adopt(path, path.stem)
    reconciled = replace(record, disk=DiskStack(record.disk.size_bytes, layers), upper=upper)
    host.database.save(reconciled)
    return reconciled


async def _remove_orphans(host: Host, records: Iterable[SandboxRecord]) -> None:
    """Remove what no record names, after all were loaded."""
    known = {record.sandbox_id: record for record in records}
    await _end_unrecorded_vmms(host.paths.run / "vm", known)
    await _unexport_unknown(host, known)
    sandboxes = host.paths.state / "sandboxes"
    for directory in sandboxes.iterdir() if sandboxes.is_dir() else ():
        if directory.name not in known:
            shutil.rmtree(directory, ignore_errors=True)
    kept = {record.pause.snapshot_id for record in known.values() if record.pause is not None}
    repository = host.layers.repository
    for manifest in repository.all(repository.node_id):
        if manifest.kind is SnapshotKind.PAUSE and manifest.snapshot_id not in kept:
            await host.layers.drop_record(manifest)


async def _unexport_unknown(host: Host, known: dict[str, SandboxRecord]) -> None:
    disks = {disk_export_name(sandbox_id) for sandbox_id, record in known.items() if record.vmm is not None}
    images = {memory_export_name(r.memory.image_id) for r in known.values() if r.vmm is not None}
    for export in await host.block.exports():
        if export.name not in disks | images:
            try:
                await host.block.unexport(export.name)
            except AenvError as error:
                log.warning("export %s of nobody stays: %s", export.name, error)


async def _end_unrecorded_vmms(runtime_root: Path, known: Mapping[str, SandboxRecord]) -> None:
    """End VMMs that were started just before the server died, so that no record names their process yet.

    Waits until they are gone, because the slots that they hold are given out next.
    """
    for directory in runtime_root.iterdir() if runtime_root.is_dir() else ():
        record = known.get(directory.name)
        for launch_record in directory.glob("*.json"):
            process = recorded(launch_record)
            if process is None or _is_recorded(process, record):
                continue
            log.info("process %d was started for %s and is in no record", process.pid, directory.name)
            if not await process.kill(UNRECORDED_GONE_S_MAX):
                log.warning("process %d does not go; its slot may be refused for a while", process.pid)
        if record is None:
            shutil.rmtree(directory, ignore_errors=True)


def _is_recorded(process: RecordedProcess, record: SandboxRecord | None) -> bool:
    if record is None or record.vmm is None:
        return False
    return (record.vmm.pid, record.vmm.start_time_ticks) == (process.pid, process.start_time_ticks)


async def _let_go_on(vmm: Vmm) -> None:
    """Idempotent `cont` within the driver's own deadline."""
    if not await vmm.is_running():
        await asyncio.shield(vmm.cont())
