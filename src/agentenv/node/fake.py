"""A node without machines, for tests of what stands on a node.

It keeps the promises of `NodeInterface` that a client can see (states, expiry, names, who may do what when) and does
nothing else. Time is a `FakeClock`: `expire()` applies the ends that have passed. `fail_next` makes the next call of
a method raise; `hold` keeps calls of a method waiting, so that a test can look at the moment in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from agentenv.clock import FakeClock
from agentenv.errors import AenvError, Conflict, InvalidRequest, SandboxNotFound, TemplateNotFound
from agentenv.model import (
    DiskStack,
    ExpiryAction,
    MachineFingerprint,
    MemoryStack,
    Resources,
    SandboxSpec,
    SandboxState,
    SandboxView,
    SnapshotKind,
    SnapshotManifest,
    Tombstone,
    new_build_id,
    new_sandbox_id,
    new_snapshot_id,
)
from agentenv.node.interface import ForkResult, RouteAnswer, RouteRefusal, RouteTarget, SnapshotResult, TemplateInfo

_FROZEN_S = 0.0125
_FORK_COUNT_MAX = 1_000
_MACHINE = MachineFingerprint("fake", "none", "0", "fake", "fake", 0, "0" * 64)


class FakeNode:
    """See the module. Not a subclass of `NodeInterface`: the type checker compares them structurally."""

    def __init__(self, clock: FakeClock | None = None, templates: tuple[str, ...] = ("base:default",)) -> None:
        self.clock = clock or FakeClock()
        self.cancelled: list[str] = []
        self.calls: list[str] = []
        self._sandboxes: dict[str, SandboxView] = {}
        self._generations: dict[str, int] = {}
        self._next_generation = 1
        self._tombstones: dict[str, Tombstone] = {}
        self._manifests: dict[str, SnapshotManifest] = {}
        self._spawned: dict[str, int] = defaultdict(int)
        self._failures: dict[str, AenvError | Exception] = {}
        self._gates: dict[str, asyncio.Event] = {}
        for name in templates:
            self.add_template(name)

    # What only tests call

    def add_template(self, name: str) -> SnapshotManifest:
        """A committed template; `name` has its tag."""
        return self._commit(SnapshotKind.TEMPLATE, name, Resources(2, 512, 1_024), source="", template="")

    def fail_next(self, method: str, error: Exception) -> None:
        """The next call of `method` raises `error`."""
        self._failures[method] = error

    def hold(self, method: str) -> asyncio.Event:
        """Calls of `method` wait until the returned event is set; a cancelled one is listed in `cancelled`."""
        return self._gates.setdefault(method, asyncio.Event())

    def replace(self, sandbox_id: str, **changes: Any) -> None:
        """Put a sandbox into any state, also one that the fake does not reach by itself."""
        self._sandboxes[sandbox_id] = dataclasses.replace(self._sandboxes[sandbox_id], **changes)

    def expire(self) -> None:
        """Pause or delete every running sandbox whose end has passed."""
        for view in list(self._sandboxes.values()):
            if view.state is SandboxState.RUNNING and view.end_at <= self.clock.wall():
                self._expire(view)

    # The interface

    async def create(self, spec: SandboxSpec) -> SandboxView:
        """See `NodeInterface`."""
        await self._enter("create")
        manifest = self.resolve_template(spec.template)
        return self._start(spec, manifest.snapshot_id, manifest.names, manifest.resources)

    async def connect(self, sandbox_id: str, timeout_s: float) -> tuple[SandboxView, bool]:
        """See `NodeInterface`."""
        await self._enter("connect")
        view = self.get(sandbox_id)
        if view.state is SandboxState.PAUSED:
            return self._wake(view, timeout_s), True
        return self._update(view, end_at=max(view.end_at, self.clock.wall() + timeout_s)), False

    async def resume(self, sandbox_id: str, timeout_s: float, on_timeout_kill: bool | None) -> SandboxView:
        """See `NodeInterface`."""
        await self._enter("resume")
        view = self.get(sandbox_id)
        if view.state is not SandboxState.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is {view.state.value}, not paused")
        if on_timeout_kill is not None:
            action = ExpiryAction.KILL if on_timeout_kill else ExpiryAction.PAUSE
            view = self._update(view, spec=dataclasses.replace(view.spec, on_timeout=action))
        return self._wake(view, timeout_s)

    async def pause(self, sandbox_id: str) -> SandboxView:
        """See `NodeInterface`."""
        await self._enter("pause")
        view = self.get(sandbox_id)
        if view.state is SandboxState.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is already paused")
        return self._sleep(view)

    async def kill(self, sandbox_id: str) -> None:
        """See `NodeInterface`."""
        await self._enter("kill")
        self._remove(self.get(sandbox_id), "deleted")

    async def set_timeout(self, sandbox_id: str, timeout_s: float) -> None:
        """See `NodeInterface`."""
        await self._enter("set_timeout")
        self._update(self.get(sandbox_id), end_at=self.clock.wall() + timeout_s)
        self.expire()

    async def snapshot(self, sandbox_id: str, name: str | None) -> SnapshotResult:
        """See `NodeInterface`."""
        await self._enter("snapshot")
        view = self.get(sandbox_id)
        manifest = self._commit(SnapshotKind.SNAPSHOT, name, view.resources, sandbox_id, view.template_id)
        return SnapshotResult(manifest, _FROZEN_S)

    async def fork(self, sandbox_id: str, count: int, timeout_s: float) -> ForkResult:
        """See `NodeInterface`. A failure planted as "fork_child" becomes the entry of the last child."""
        await self._enter("fork")
        view = self.get(sandbox_id)
        if view.state is SandboxState.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is paused")
        if not 1 <= count <= _FORK_COUNT_MAX:
            raise InvalidRequest("count is out of range")
        spec = dataclasses.replace(view.spec, timeout_s=timeout_s)
        names = () if view.alias is None else (view.alias,)
        children: list[SandboxView | AenvError] = [
            self._start(spec, view.template_id, names, view.resources) for _ in range(count)
        ]
        failure = self._failures.pop("fork_child", None)
        if isinstance(failure, AenvError):
            children[-1] = failure
        return ForkResult(tuple(children), _FROZEN_S)

    def get(self, sandbox_id: str) -> SandboxView:
        """See `NodeInterface`."""
        self._fail("get")
        if (view := self._sandboxes.get(sandbox_id)) is not None:
            return view
        stone = self._tombstones.get(sandbox_id)
        why = f" ({stone.reason})" if stone else ""
        raise SandboxNotFound(f"sandbox {sandbox_id} was not found{why}")

    def tombstone(self, sandbox_id: str) -> Tombstone | None:
        """See `NodeInterface`."""
        return self._tombstones.get(sandbox_id)

    def list_sandboxes(self) -> list[SandboxView]:
        """See `NodeInterface`."""
        self._fail("list_sandboxes")
        return list(self._sandboxes.values())

    def list_snapshots(self) -> list[SnapshotManifest]:
        """See `NodeInterface`."""
        return [manifest for manifest in self._manifests.values() if manifest.kind is SnapshotKind.SNAPSHOT]

    def list_templates(self) -> list[TemplateInfo]:
        """See `NodeInterface`."""
        found = [manifest for manifest in self._manifests.values() if manifest.kind is SnapshotKind.TEMPLATE]
        return [TemplateInfo(manifest, self._spawned[manifest.snapshot_id]) for manifest in found]

    def resolve_template(self, reference: str) -> SnapshotManifest:
        """See `NodeInterface`."""
        base, _, tag = reference.partition(":")
        full = f"{base}:{tag or 'default'}"
        for manifest in self._manifests.values():
            if full in manifest.names or (base == manifest.snapshot_id and tag in ("", "default")):
                return manifest
        raise TemplateNotFound(f"template {reference!a} was not found")

    async def delete_snapshot(self, reference: str) -> None:
        """See `NodeInterface`."""
        await self._enter("delete_snapshot")
        del self._manifests[self.resolve_template(reference).snapshot_id]

    async def resolve_route(self, sandbox_id: str, port: int) -> RouteAnswer:
        """See `NodeInterface`."""
        await self._enter("resolve_route")
        view = self._sandboxes.get(sandbox_id)
        if view is None or (view.state is SandboxState.PAUSED and not view.spec.auto_resume):
            return RouteRefusal(sandbox_id, "not_found")
        if view.state is SandboxState.PAUSED:
            view = self._wake(view, view.spec.timeout_s)
        if view.state is not SandboxState.RUNNING:
            return RouteRefusal(sandbox_id, "in_transition")
        generation = self._generations[sandbox_id]
        mask = view.spec.mask_request_host
        return RouteTarget("10.12.0.1", port, generation, view.traffic_access_token, mask)

    def live_generations(self) -> tuple[list[int], int]:
        """See `NodeInterface`."""
        return sorted(self._generations.values()), self._next_generation

    def describe(self) -> dict[str, Any]:
        """See `NodeInterface`."""
        return {"driver": "fake", "accelerator": "none", "sandboxes": {"total": len(self._sandboxes)}}

    # Inside

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        self._fail(method)
        gate = self._gates.get(method)
        try:
            await (gate.wait() if gate is not None else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled.append(method)
            raise

    def _fail(self, method: str) -> None:
        if (failure := self._failures.pop(method, None)) is not None:
            raise failure

    def _start(self, spec: SandboxSpec, template_id: str, names: tuple[str, ...], resources: Resources) -> SandboxView:
        now = self.clock.wall()
        sandbox_id = new_sandbox_id()
        self._spawned[template_id] += 1
        view = SandboxView(
            sandbox_id=sandbox_id,
            template_id=template_id,
            alias=names[0].partition(":")[0] if names else None,
            state=SandboxState.RUNNING,
            spec=spec,
            resources=resources,
            started_at=now,
            end_at=now + spec.timeout_s,
            envd_access_token=f"envd-{sandbox_id}" if spec.secure else None,
            traffic_access_token=None if spec.allow_public_traffic else f"traffic-{sandbox_id}",
        )
        self._sandboxes[sandbox_id] = view
        self._new_generation(sandbox_id)
        return view

    def _wake(self, view: SandboxView, timeout_s: float) -> SandboxView:
        self._new_generation(view.sandbox_id)
        end_at = self.clock.wall() + timeout_s
        return self._update(view, state=SandboxState.RUNNING, end_at=end_at, pause_safety=None)

    def _sleep(self, view: SandboxView) -> SandboxView:
        self._generations.pop(view.sandbox_id, None)
        return self._update(view, state=SandboxState.PAUSED, pause_safety="held")

    def _expire(self, view: SandboxView) -> None:
        if view.spec.on_timeout is ExpiryAction.PAUSE:
            self._sleep(view)
        else:
            self._remove(view, "expired")

    def _remove(self, view: SandboxView, reason: str) -> None:
        del self._sandboxes[view.sandbox_id]
        self._generations.pop(view.sandbox_id, None)
        self._tombstones[view.sandbox_id] = Tombstone(view.sandbox_id, self.clock.wall(), reason)

    def _update(self, view: SandboxView, **changes: Any) -> SandboxView:
        self._sandboxes[view.sandbox_id] = changed = dataclasses.replace(view, **changes)
        return changed

    def _new_generation(self, sandbox_id: str) -> None:
        self._generations[sandbox_id] = self._next_generation
        self._next_generation += 1

    def _commit(
        self, kind: SnapshotKind, name: str | None, resources: Resources, source: str, template: str
    ) -> SnapshotManifest:
        snapshot_id = new_snapshot_id()
        for other_id, other in list(self._manifests.items()):
            if name in other.names:
                names = tuple(known for known in other.names if known != name)
                self._manifests[other_id] = dataclasses.replace(other, names=names)
        manifest = SnapshotManifest(
            snapshot_id=snapshot_id,
            kind=kind,
            created_at=self.clock.wall(),
            resources=resources,
            disk=DiskStack(resources.disk_mib << 20, ()),
            memory=MemoryStack(snapshot_id, resources.memory_mib << 20, ()),
            device_state="",
            machine=_MACHINE,
            token_owner=source,
            source_sandbox_id=source,
            template_id=template,
            names=() if name is None else (name,),
            build_id=new_build_id(),
        )
        self._manifests[snapshot_id] = manifest
        return manifest


if TYPE_CHECKING:
    from agentenv.node.interface import NodeInterface

    # mypy compares every signature here.
    _conforms: NodeInterface = FakeNode()
