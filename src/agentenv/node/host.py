"""Everything that the owner tasks of one node share. A bag of collaborators, wired once by `node.compose`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.block import BlockClient
from agentenv.clock import Clock
from agentenv.guest.client import GuestIdentity
from agentenv.model import SnapshotManifest
from agentenv.network import SlotPool
from agentenv.node.admission import Admission
from agentenv.node.database import Database
from agentenv.node.images import MemoryImages
from agentenv.node.layers import Layers
from agentenv.node.prefetching import FirstStarts
from agentenv.node.tokens import Tokens
from agentenv.snapshots import Catalog
from agentenv.vmm import GuestKernel, VmmDriver


class GuestCalls(Protocol):
    """envd, as far as owner tasks know it; the module `guest.client` is the real one."""

    async def init(self, address: str, identity: GuestIdentity, generation: int, deadline_s: float) -> None:
        """Make the guest this sandbox. Raises `GuestUnresponsive` or `GuestError`."""

    async def prepare_image(self, address: str, user: str, owner: str, workdir: str, deadline_s: float) -> None:
        """Make what the SDKs rely on and an image may lack. Raises `GuestError` or `GuestUnresponsive`."""

    async def freeze_disk(self, address: str, token: str, deadline_s: float) -> None:
        """Write out and freeze the root file system, for good. Raises `GuestError` or `GuestUnresponsive`."""

    async def warm_up(self, address: str, runs: int, token: str | None = None) -> None:
        """Run a shell a few times; raises nothing."""


class Withdrawals(Protocol):
    """The proxy, as far as owner tasks know it."""

    async def withdraw(self, generations: list[int]) -> int:
        """Forget the generations and reset their connections; returns how many. Never raises for a dead proxy."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Directories of the node."""

    state: Path
    run: Path

    def sandbox_dir(self, sandbox_id: str) -> Path:
        """Uppers of one sandbox."""
        return self.state / "sandboxes" / sandbox_id

    def upper(self, sandbox_id: str, layer_id: str) -> Path:
        return self.sandbox_dir(sandbox_id) / f"{layer_id}.lsmt"

    def runtime_dir(self, sandbox_id: str) -> Path:
        """Control socket, console and launch record of one VMM; short, for the socket's sake."""
        return self.run / "vm" / sandbox_id


@dataclass(slots=True)
class Host:
    """The collaborators. Fields never change after composition."""

    paths: Paths
    clock: Clock
    database: Database
    catalog: Catalog
    layers: Layers
    images: MemoryImages
    first_starts: FirstStarts
    block: BlockClient
    slots: SlotPool
    driver: VmmDriver
    kernel: GuestKernel
    tokens: Tokens
    admission: Admission
    proxy: Withdrawals
    guest: GuestCalls
    boot_id: str
    # How long a halted VMM is kept after its pause has become durable.
    pause_linger_s: float
    # Set by the node: asks for a collection of unneeded layers soon.
    collect_soon: Callable[[], None]

    def commit_to_catalog(self, manifest: SnapshotManifest) -> None:
        """Make a committed snapshot resolvable. Call it after `Repository.commit` returned."""
        self.catalog.add(manifest)


def boot_id() -> str:
    """The kernel's id of this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
