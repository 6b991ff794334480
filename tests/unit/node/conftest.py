"""A node over fakes: real owner tasks, steps, database and repository; no process, no kernel, no network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.block import FakeBlock
from agentenv.clock import FakeClock
from agentenv.errors import AenvError, OperationFailed
from agentenv.guest.client import GuestIdentity
from agentenv.lifecycle import Phase
from agentenv.model import DiskStack, Resources, SandboxSpec, SandboxView, SnapshotManifest
from agentenv.network import SlotPool
from agentenv.network.fake import FakeSlotHost
from agentenv.node.admission import Admission, Limits
from agentenv.node.database import Database
from agentenv.node.following import referable
from agentenv.node.host import Host, Paths
from agentenv.node.images import MemoryImages
from agentenv.node.layers import Layers
from agentenv.node.node import Node, NodeSettings
from agentenv.node.owner import Owner
from agentenv.node.prefetching import FirstStarts
from agentenv.node.tokens import Tokens
from agentenv.snapshots import Catalog, CommittedRepository, LinkPublisher, PosixStore, Process, Staging, new_local_id
from agentenv.vmm import GuestKernel
from agentenv.vmm.fake import FakeDriver, FakeHost

RESOURCES = Resources(cpu_count=1, memory_mib=1, disk_mib=1)
DISK_BYTES = 1 << 20
LIMITS = Limits(100, 4, 100, 5.0, 8192, 512, 2)


@dataclass
class FakeGuest:
    """Answers /init, or fails as told."""

    greeted: list[GuestIdentity] = field(default_factory=list)
    errors: list[AenvError] = field(default_factory=list)

    async def init(self, address: str, identity: GuestIdentity, generation: int, deadline_s: float) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.greeted.append(identity)

    async def prepare_image(self, address: str, user: str, owner: str, workdir: str, deadline_s: float) -> None:
        return

    async def freeze_disk(self, address: str, token: str, deadline_s: float) -> None:
        return

    async def warm_up(self, address: str, runs: int, token: str | None = None) -> None:
        return


@dataclass
class FakeProxy:
    """Remembers what was withdrawn."""

    withdrawn: list[int] = field(default_factory=list)

    async def withdraw(self, generations: list[int]) -> int:
        self.withdrawn += generations
        return 0


class Dead:
    """What a dead server's tasks reach: nothing."""

    def __getattr__(self, name: str) -> Any:
        def nothing(*_: object, **__: object) -> Any:
            raise OperationFailed(f"{name}: this server is dead")

        return nothing


class World:
    """What outlives a server: files, database, blockd, VMM processes, namespaces. `start` makes a server in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vmms = FakeHost()
        self.block = FakeBlock(root / "blockd")
        self.block.process_exists = lambda pid: pid in self.vmms.processes
        self.slot_host = FakeSlotHost()
        self.guest = FakeGuest()
        self.origins: list[dict[str, str]] = []
        self.proxy = FakeProxy()
        self.clock = FakeClock()
        self.staging = Staging(root / "staging")
        self.store = PosixStore(root / "repository")
        self.boot_id = "boot-1"
        self.pause_linger_s = 0.0
        self._dead_tasks: list[asyncio.Task[None]] = []
        self.node: Node
        self.host: Host

    async def start(self, *, warm: int = 0) -> Node:
        """A new server over the same world, recovered."""
        slots = SlotPool(self.slot_host)
        await slots.start()
        self.repository = CommittedRepository(
            self.store,
            LinkPublisher(self.store, self.block),
            self.staging,
            self.root / "blobs",
            Process("n1"),
        )
        await self.repository.load()
        layers = Layers(self.repository, 0.0, self.origins.append)
        self.host = Host(
            paths=Paths(self.root, self.root / "run"),
            clock=self.clock,
            database=Database(self.root / "node.db"),
            layers=layers,
            catalog=Catalog(referable(self.repository.all()).values()),
            images=MemoryImages(self.block, layers),
            first_starts=FirstStarts(self.block, layers, self.store, self.root / "staging", 0),
            block=self.block,
            slots=slots,
            driver=FakeDriver(self.vmms),
            kernel=GuestKernel(self.root / "vmlinux", self.root / "initramfs", "k1"),
            tokens=Tokens(b"s" * 32),
            admission=Admission(LIMITS, lambda: 4096),
            proxy=self.proxy,
            guest=self.guest,
            boot_id=self.boot_id,
            pause_linger_s=self.pause_linger_s,
            collect_soon=lambda: None,
        )
        self.node = Node(self.host, NodeSettings(10, warm, "fake", 3600.0))
        await self.node.recover()
        return self.node

    async def stop(self) -> None:
        """An orderly end of the server."""
        await self.node.shut_down()
        await self.host.slots.close()
        self.host.database.close()

    def crash(self) -> None:
        """The server dies where it stands. Its tasks hang for ever at the gate that the test holds; cut from the world,
        they can undo nothing, as a killed process cannot."""
        for owner in self.owners():
            self._dead_tasks += [t for t in (owner._exit_watch, owner._work and owner._work.task) if t is not None]
            if owner._timer is not None:
                owner._timer.cancel()
        dead = self.host
        dead.database.close()
        dead.slots = dead.block = dead.database = dead.proxy = Dead()  # type: ignore[assignment]
        self.vmms._gates.clear()
        self.slot_host.release()

    async def bury_the_dead(self) -> None:
        for task in self._dead_tasks:
            task.cancel()
        await asyncio.gather(*self._dead_tasks, return_exceptions=True)

    def owners(self) -> list[Owner]:
        return list(self.node._owners.values())

    def owner(self, sandbox_id: str) -> Owner:
        return self.node._owners[sandbox_id]

    async def template(self) -> SnapshotManifest:
        """A committed template called `base`, built as a real one is."""
        layer = new_local_id()
        self.staging.layer(layer).write_bytes(b"\0" * DISK_BYTES)
        with self.host.layers.reserved(layer):
            manifest = await self.node.build_template("base", DiskStack(DISK_BYTES, (layer,)), RESOURCES)
        async with asyncio.timeout(5):
            while self.owners():
                await asyncio.sleep(0.001)
        return manifest

    def stored_ids(self) -> set[str]:
        """Every local layer and every blob of the repository."""
        folders = (self.staging.layers_dir, self.store.root / "layers", self.store.root / "states")
        return {path.name.partition(".")[0] for folder in folders if folder.is_dir() for path in folder.iterdir()}

    async def collect(self) -> None:
        """Collect staging and repository now."""
        await self.node._collector.sweep()
        await self.host.layers.sweep()

    async def until(self, sandbox_id: str, phase: Phase) -> None:
        """Let things happen until the sandbox is in a phase."""
        async with asyncio.timeout(5):
            while self.owner(sandbox_id).phase is not phase:
                await asyncio.sleep(0.001)

    async def idle(self, sandbox_id: str) -> None:
        """Let the sandbox's work end: the last phase is there before what follows it (memory given back) is done."""
        async with asyncio.timeout(5):
            while self.owner(sandbox_id)._work is not None:
                await asyncio.sleep(0.001)

    async def gone(self, sandbox_id: str) -> None:
        async with asyncio.timeout(5):
            while sandbox_id in self.node._owners:
                await asyncio.sleep(0.001)

    async def leftovers(self) -> list[str]:
        """What nobody should hold when no sandbox exists."""
        found = [f"process {pid}" for pid in self.vmms.processes]
        found += [e.name for e in await self.block.exports() if e.kind == "disk"]
        found += [str(p) for p in (self.root / "sandboxes").glob("*")]
        return found


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "sandboxes").mkdir()
    made = World(tmp_path)
    await made.start()
    await made.template()
    yield made
    await made.bury_the_dead()
    await made.stop()


@pytest.fixture
async def sandbox(world: World) -> SandboxView:
    return await world.node.create(SandboxSpec("base", 300))


def spec(**changes: object) -> SandboxSpec:
    return replace(SandboxSpec("base", 300), **changes)  # type: ignore[arg-type]
