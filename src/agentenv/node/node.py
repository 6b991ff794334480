"""The node: all sandboxes of one host behind `NodeInterface`. Decides which owner a request goes to, and no more.

Does not own how a sandbox changes (`owner` and the steps), what a former server left (`recovery`), HTTP (`api`), or the
making of its collaborators (`compose`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

from agentenv.errors import AenvError, Conflict, InvalidRequest, NodeStopping, SandboxNotFound
from agentenv.lifecycle import POOLED, SERVING, WITH_VMM, Action, Event, Phase
from agentenv.model import (
    DiskStack,
    ExpiryAction,
    Resources,
    SandboxSpec,
    SandboxView,
    SnapshotKind,
    SnapshotManifest,
    Tombstone,
)
from agentenv.node import recovery
from agentenv.node.branching import BranchPoint, SnapshotParams
from agentenv.node.collecting import Collector
from agentenv.node.following import Follower
from agentenv.node.host import Host
from agentenv.node.interface import (
    ForkResult,
    RouteAnswer,
    RouteRefusal,
    SnapshotResult,
    TemplateInfo,
)
from agentenv.node.launching import alias_of, record_of_snapshot
from agentenv.node.owner import Owner
from agentenv.node.record import SandboxRecord
from agentenv.node.starting import GENERATION_COUNTER, Claim, ResumeParams
from agentenv.node.steps import STEPS
from agentenv.node.viewing import route_target, view
from agentenv.node.warm import WarmPool
from agentenv.node.workshop import COLD_BOOT_COUNTER, Workshop
from agentenv.snapshots import ids_of, parse_reference

log = logging.getLogger(__name__)

# A request of the proxy for a sandbox in transition waits this long before it is told to try again.
ROUTE_WAIT_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the node itself decides by."""

    fork_count_max: int
    warm_per_template: int
    # Why this driver was chosen, one line a candidate.
    virtualization: str
    # How often the repository is looked at for snapshots of other nodes.
    refresh_s: float


class Node:
    """See `NodeInterface` for the promises of each method."""

    def __init__(self, host: Host, settings: NodeSettings) -> None:
        self._host = host
        self._settings = settings
        self._owners: dict[str, Owner] = {}
        self._spawned: Counter[str] = Counter()
        self._stopping = False
        self._collector = Collector(host, lambda: [owner.record for owner in self._owners.values()])
        self._warm = WarmPool(
            settings.warm_per_template,
            self._launch_clone,
            lambda owner, manifest: owner.adopt_work(Event.WARMED, (Action.WARM_UP,), manifest),
            host.admission.is_busy,
            host.clock.monotonic,
        )
        self._workshop = Workshop(host, self._add_owner, self._start_anew)
        self._follower = Follower(host, settings.refresh_s, self._warm.forget)
        host.collect_soon = self._collector.soon
        host.admission.live_count = self._live_count

    # Start and stop

    async def recover(self) -> None:
        """Take over what a former server left. Call once, before any request."""
        await recovery.take_over(self._host, self._add_owner)
        await recovery.hold_anew(self._host, (owner.record for owner in self._owners.values()))
        self._collector.soon()
        self._follower.start()

    async def shut_down(self) -> None:
        """Stop deciding; sandboxes go on. The next server takes over."""
        self._stopping = True
        await self._warm.close()
        await self._follower.stop()
        await self._collector.stop()
        await self._host.first_starts.stop()
        await asyncio.gather(*(owner.shut_down() for owner in self._owners.values()))
        await self._host.layers.close()

    def has_live_vmm(self) -> bool:
        """Whether any VMM process depends on the node's daemons."""
        return any(owner.vmm is not None for owner in self._owners.values())

    # Requests

    async def create(self, spec: SandboxSpec) -> SandboxView:
        manifest = await self._follower.find(spec.template)
        self._host.admission.check_fits(manifest.resources)
        clone = self._warm.take(manifest)
        if clone is not None:
            return await self._claimed(clone, spec, manifest)
        return view(await self._start_anew(spec, manifest))

    async def connect(self, sandbox_id: str, timeout_s: float) -> tuple[SandboxView, bool]:
        owner = self._owner(sandbox_id)
        resumed = bool(await owner.ask(Event.RESUME, ResumeParams(timeout_s)))
        owner.set_end(max(owner.record.end_at, self._host.clock.wall() + timeout_s))
        return view(owner), resumed

    async def resume(self, sandbox_id: str, timeout_s: float, on_timeout_kill: bool | None) -> SandboxView:
        owner = self._owner(sandbox_id)
        if owner.phase in SERVING:
            raise Conflict(f"sandbox {sandbox_id} is running already")
        await owner.ask(Event.RESUME, ResumeParams(timeout_s))
        if on_timeout_kill is not None:
            action = ExpiryAction.KILL if on_timeout_kill else ExpiryAction.PAUSE
            owner.update(spec=replace(owner.record.spec, on_timeout=action))
        return view(owner)

    async def pause(self, sandbox_id: str) -> SandboxView:
        owner = self._owner(sandbox_id)
        await owner.ask(Event.PAUSE)
        return view(owner)

    async def kill(self, sandbox_id: str) -> None:
        owner = self._owner(sandbox_id)
        owner.condemn("deleted")
        await owner.ask(Event.KILL)

    async def set_timeout(self, sandbox_id: str, timeout_s: float) -> None:
        self._owner(sandbox_id).set_end(self._host.clock.wall() + timeout_s)

    async def snapshot(self, sandbox_id: str, name: str | None) -> SnapshotResult:
        if not name:
            return await self._snapshot(sandbox_id, SnapshotParams(SnapshotKind.SNAPSHOT))
        full_name = parse_reference(name)
        self._owner(sandbox_id)
        async with self._host.layers.reserved_name(full_name):
            return await self._snapshot(sandbox_id, SnapshotParams(SnapshotKind.SNAPSHOT, (full_name,)))

    async def fork(self, sandbox_id: str, count: int, timeout_s: float) -> ForkResult:
        if not 1 <= count <= self._settings.fork_count_max:
            raise InvalidRequest(f"count is {count}; it must be from 1 to {self._settings.fork_count_max}")
        owner = self._owner(sandbox_id)
        point: BranchPoint = await owner.ask(Event.FORK)
        spec = replace(owner.record.spec, timeout_s=timeout_s)
        try:
            children = [self._launch(spec, point.manifest) for _ in range(count)]
        finally:
            # From here on the children's records name the layers.
            self._host.layers.release(*ids_of(point.manifest))
        starts = (self._started(child, point.manifest) for child in children)
        results = await asyncio.gather(*starts, return_exceptions=True)
        return ForkResult(tuple(_child_result(result) for result in results), point.frozen_s)

    async def delete_snapshot(self, reference: str) -> None:
        manifest = await self._follower.find(reference)
        await self._host.layers.remove_record(manifest)
        self._host.catalog.discard(manifest.snapshot_id)
        self._warm.forget(manifest.snapshot_id)
        self._collector.soon()

    def check_fits(self, resources: Resources) -> None:
        """Raises `InvalidRequest` for a machine that this node could never run."""
        self._host.admission.check_fits(resources)

    async def build_template(
        self, name: str, disk: DiskStack, resources: Resources, image_config: dict[str, Any] | None = None
    ) -> SnapshotManifest:
        """Boot a disk, wait for its daemon, and commit the running machine as a template called `name`.

        The guest of a template has no token and no identity: every restore gives it one. `image_config` is that of the
        OCI image that the disk was made of; the user and the directory that it lacks are made. The caller reserves and
        holds the layers.
        """
        self._host.admission.check_fits(resources)
        return await self._workshop.build_template(name, disk, resources, image_config)

    def settled_disk(self, manifest: SnapshotManifest) -> AbstractAsyncContextManager[DiskStack]:
        """The disk of a snapshot with everything on it that its guest had still in memory; kept while the block lasts.

        A clone without a network is started for it, writes out what it holds, and ends.
        """
        return self._workshop.settled_disk(manifest)

    # Look-ups

    def get(self, sandbox_id: str) -> SandboxView:
        return view(self._owner(sandbox_id))

    def tombstone(self, sandbox_id: str) -> Tombstone | None:
        owner = self._owners.get(sandbox_id)
        if owner is not None and owner.phase not in _ENDING:
            return None
        # It is gone for everybody from the moment its end begins, which is before the tombstone is stored.
        return self._host.database.tombstone(sandbox_id) or (owner.end_reason if owner is not None else None)

    def list_sandboxes(self) -> list[SandboxView]:
        return [view(owner) for owner in self._owners.values() if owner.phase not in _HIDDEN]

    def list_snapshots(self) -> list[SnapshotManifest]:
        catalog = self._host.catalog
        return [replace(m, names=catalog.names_of(m)) for m in catalog.of_kind(SnapshotKind.SNAPSHOT)]

    def list_templates(self) -> list[TemplateInfo]:
        catalog = self._host.catalog
        templates = catalog.of_kind(SnapshotKind.TEMPLATE)
        return [TemplateInfo(replace(m, names=catalog.names_of(m)), self._spawned[m.snapshot_id]) for m in templates]

    def resolve_template(self, reference: str) -> SnapshotManifest:
        return self._host.catalog.resolve(reference)

    async def find_template(self, reference: str) -> SnapshotManifest:
        """As `resolve_template`, and looks for what other nodes have committed meanwhile."""
        return await self._follower.find(reference)

    def collect_soon(self) -> None:
        """Something became garbage: sweep soon, the repository included."""
        self._host.layers.ask_for_sweep()
        self._collector.soon()

    async def collect_staging(self) -> tuple[int, int]:
        """Remove local layers that nothing needs, now, and let go of holds; how many files and bytes went."""
        await self._follower.look()
        return await self._collector.sweep()

    def needed_layers(self) -> set[str]:
        """Layers that sandboxes and work in progress need."""
        return self._collector.needed()

    async def resolve_route(self, sandbox_id: str, port: int) -> RouteAnswer:
        owner = self._owners.get(sandbox_id)
        if owner is None or owner.phase in _HIDDEN:
            return RouteRefusal(sandbox_id, "not_found")
        try:
            await owner.settled(ROUTE_WAIT_S_MAX)
            if owner.phase not in SERVING and owner.record.spec.auto_resume:
                await owner.ask(Event.RESUME, ResumeParams(owner.record.spec.timeout_s))
        except TimeoutError:
            return RouteRefusal(sandbox_id, "in_transition")
        except AenvError as error:
            log.warning("sandbox %s was not resumed on traffic: %s", sandbox_id, error)
        if owner.phase not in SERVING or owner.slot is None:
            return RouteRefusal(sandbox_id, "not_found")
        return route_target(owner, port)

    def live_generations(self) -> tuple[list[int], int]:
        serving = [o.record.generation for o in self._owners.values() if o.phase in SERVING]
        return serving, self._host.database.value(GENERATION_COUNTER) + 1

    def describe(self) -> dict[str, Any]:
        states = Counter(o.phase.value if o.phase in POOLED else o.state.value for o in self._owners.values())
        return {
            "driver": self._host.driver.name,
            "accelerator": self._host.driver.accelerator,
            "virtualization": self._settings.virtualization,
            "kernel": self._host.kernel.version,
            "cold_boot_ms": self._host.database.value(COLD_BOOT_COUNTER) / 1000,
            "sandboxes": dict(states),
            "snapshots": len(self._host.catalog.all()),
        }

    # Inside

    def _live_count(self) -> int:
        return sum(owner.phase in WITH_VMM for owner in self._owners.values())

    def _owner(self, sandbox_id: str) -> Owner:
        if self._stopping:
            raise NodeStopping("the server is shutting down; try again when it is back")
        owner = self._owners.get(sandbox_id)
        if owner is not None and owner.phase not in _HIDDEN:
            return owner
        tombstone = self.tombstone(sandbox_id)
        if tombstone is None:
            raise SandboxNotFound(f"sandbox {sandbox_id[:64]} does not exist")
        detail = f": {tombstone.detail}" if tombstone.detail else ""
        raise SandboxNotFound(f"sandbox {sandbox_id} does not exist any more ({tombstone.reason}{detail})")

    def _launch(self, spec: SandboxSpec, manifest: SnapshotManifest, phase: Phase = Phase.CREATING) -> Owner:
        """Make the record and the owner of a new sandbox; the record names the layers from here on."""
        if self._stopping:
            raise NodeStopping("the server is shutting down; try again when it is back")
        return self._add_owner(record_of_snapshot(self._host, spec, manifest, phase))

    async def _launch_clone(self, manifest: SnapshotManifest) -> Owner:
        """A clone that is nobody's yet; its secret token is its own already, since it derives from its id."""
        spec = SandboxSpec(template=manifest.snapshot_id, timeout_s=0.0)
        async with self._host.layers.relied_on(manifest):
            return self._launch(spec, manifest, Phase.WARMING)

    async def _claimed(self, clone: Owner, spec: SandboxSpec, manifest: SnapshotManifest) -> SandboxView:
        """Make a warm clone this create's sandbox; a clone that fails to is replaced by a start from the snapshot."""
        claim = Claim(spec, alias_of(self._host, manifest))
        try:
            await clone.ask(Event.CLAIM, claim)
        except AenvError as error:
            log.warning("warm clone %s could not be used: %s", clone.sandbox_id, error)
            return view(await self._start_anew(spec, manifest))
        except asyncio.CancelledError:
            self._abandon(clone)
            raise
        self._spawned[manifest.snapshot_id] += 1
        return view(clone)

    async def _start_anew(self, spec: SandboxSpec, manifest: SnapshotManifest) -> Owner:
        async with self._host.layers.relied_on(manifest):
            owner = self._launch(spec, manifest)
        await self._started(owner, manifest)
        return owner

    async def _started(self, owner: Owner, manifest: SnapshotManifest) -> SandboxView:
        done = owner.adopt_work(Event.STARTED, (Action.START,), manifest)
        try:
            await done
        except asyncio.CancelledError:
            self._abandon(owner)
            raise
        self._spawned[manifest.snapshot_id] += 1
        return view(owner)

    def _abandon(self, owner: Owner) -> None:
        """Its creator went away before it had started: nobody knows its id, so nobody could ever end it."""
        owner.condemn("create_failed", "its creator went away before it had started")
        owner.ask(Event.KILL)

    def _add_owner(self, record: SandboxRecord) -> Owner:
        self._host.database.save(record)
        owner = Owner(self._host, record, STEPS, self._forget)
        self._owners[record.sandbox_id] = owner
        return owner

    def _forget(self, owner: Owner) -> None:
        self._owners.pop(owner.sandbox_id, None)

    async def _snapshot(self, sandbox_id: str, params: SnapshotParams) -> SnapshotResult:
        result: SnapshotResult = await self._owner(sandbox_id).ask(Event.SNAPSHOT, params)
        return result


# Phases in which a sandbox does not exist for anybody outside.
_ENDING: Final = frozenset({Phase.KILLING, Phase.GONE})
_HIDDEN: Final = POOLED | _ENDING


def _child_result(result: SandboxView | BaseException) -> SandboxView | AenvError:
    if isinstance(result, BaseException) and not isinstance(result, AenvError):
        raise result
    return result
