"""Machines that nobody uses: one boots a disk to become a template, one settles the disk of a snapshot for an export.

Owns their steps from start to end. Does not own where disks come from (`templates`, `images`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from agentenv.lifecycle import Action, Event
from agentenv.model import (
    DEFAULT_USER,
    DiskStack,
    ExpiryAction,
    MemoryStack,
    NetworkPolicy,
    Resources,
    SandboxSpec,
    SnapshotKind,
    SnapshotManifest,
    image_user,
    image_workdir,
)
from agentenv.node.branching import SnapshotParams, frozen_branch
from agentenv.node.host import Host
from agentenv.node.interface import SnapshotResult
from agentenv.node.launching import new_record
from agentenv.node.owner import Owner
from agentenv.node.record import SandboxRecord
from agentenv.snapshots import ids_of, parse_reference

# So often a template's guest runs a shell before its snapshot: what it touches is in the image of every clone.
WARM_UP_RUNS: Final = 3
PREPARE_IMAGE_S_MAX: Final = 60.0
# Nobody's time to live; the work itself ends the machine.
MACHINE_S: Final = 3600
# Microseconds from the start of the last template's VMM to its daemon's answer; kept for the curious.
COLD_BOOT_COUNTER: Final = "cold_boot_us"


class Workshop:
    """Of one node, which adds owners and starts sandboxes for it."""

    def __init__(
        self,
        host: Host,
        add: Callable[[SandboxRecord], Owner],
        start: Callable[[SandboxSpec, SnapshotManifest], Awaitable[Owner]],
    ) -> None:
        self._host = host
        self._add = add
        self._start = start

    async def build_template(
        self, name: str, disk: DiskStack, resources: Resources, image_config: dict[str, Any] | None
    ) -> SnapshotManifest:
        """See `Node.build_template`."""
        full_name = parse_reference(name)
        memory = MemoryStack(f"zero-{resources.memory_mib}", resources.memory_mib << 20, ())
        spec = SandboxSpec(name, MACHINE_S, on_timeout=ExpiryAction.KILL, secure=False)
        record = new_record(self._host, spec, resources, disk, memory)
        owner = self._add(replace(record, image_config=image_config or {}))
        try:
            await self._boot(owner, image_config)
            async with self._host.layers.reserved_name(full_name):
                params = SnapshotParams(SnapshotKind.TEMPLATE, (full_name,))
                result: SnapshotResult = await owner.ask(Event.SNAPSHOT, params)
            return result.manifest
        finally:
            owner.condemn("deleted", "a template was built in it")
            await owner.ask(Event.KILL)

    @asynccontextmanager
    async def settled_disk(self, manifest: SnapshotManifest) -> AsyncIterator[DiskStack]:
        """See `Node.settled_disk`."""
        policy = NetworkPolicy(allow_internet=False)
        spec = SandboxSpec(manifest.snapshot_id, MACHINE_S, on_timeout=ExpiryAction.KILL, network=policy)
        clone = await self._start(spec, manifest)
        try:
            point = await frozen_branch(clone)
        finally:
            clone.condemn("deleted", "its disk was exported")
            await asyncio.shield(clone.ask(Event.KILL))
        try:
            yield point.manifest.disk
        finally:
            self._host.layers.release(*ids_of(point.manifest))

    async def _boot(self, owner: Owner, image_config: dict[str, Any] | None) -> None:
        host = self._host
        started = host.clock.monotonic()
        await owner.adopt_work(Event.STARTED, (Action.START,), None)
        host.database.set_value(COLD_BOOT_COUNTER, round((host.clock.monotonic() - started) * 1e6))
        assert owner.slot is not None
        if image_config is not None:
            user, workdir = image_user(image_config), image_workdir(image_config)
            await host.guest.prepare_image(owner.slot.address, DEFAULT_USER, user, workdir, PREPARE_IMAGE_S_MAX)
        await host.guest.warm_up(owner.slot.address, WARM_UP_RUNS)
