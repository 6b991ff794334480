"""What the API may ask of a node. The real one is `node.node.Node`; tests of the API use `node.fake.FakeNode`.

Every method raises only `AenvError`s. A caller that is cancelled (client gone) never leaves a half-done operation:
the owner task of the sandbox finishes or undoes it. All times are Unix seconds, all durations seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from agentenv.errors import AenvError
from agentenv.model import SandboxSpec, SandboxState, SandboxView, SnapshotManifest, Tombstone


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """One committed snapshot, and for how long the source's virtual CPUs stood still."""

    manifest: SnapshotManifest
    frozen_s: float


@dataclass(frozen=True, slots=True)
class ForkResult:
    """Exactly one entry per requested child, a running sandbox or the error that it met, in order."""

    children: tuple[SandboxView | AenvError, ...]
    frozen_s: float


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """A named snapshot as `template ls` shows it."""

    manifest: SnapshotManifest
    spawn_count: int


class NodeInterface(Protocol):
    """One node. See the module's docstring for what holds of every method."""

    async def create(self, spec: SandboxSpec) -> SandboxView:
        """Start a sandbox; returns when its guest daemon answered /init.

        Raises `TemplateNotFound`, `AtCapacity`, `InvalidRequest` (a template larger than the node), `OperationFailed`.
        """

    async def connect(self, sandbox_id: str, timeout_s: float) -> tuple[SandboxView, bool]:
        """Resume when paused (waits for a pause in progress) and extend the end: max(old, now + timeout).

        The flag says whether it was resumed. Raises `SandboxNotFound`, `AtCapacity`, `OperationFailed`.
        """

    async def resume(self, sandbox_id: str, timeout_s: float, on_timeout_kill: bool | None) -> SandboxView:
        """Resume a paused sandbox; `Conflict` when it runs. `on_timeout_kill` replaces the action unless None."""

    async def pause(self, sandbox_id: str) -> SandboxView:
        """Pause; a second pause joins one in progress. `Conflict` when it is paused (the SDK maps 409 to False).

        Raises `StorageFull` (the sandbox goes on running), `SandboxNotFound`, `OperationFailed`.
        """

    async def kill(self, sandbox_id: str) -> None:
        """End it in any state. Raises `SandboxNotFound` when there is none."""

    async def set_timeout(self, sandbox_id: str, timeout_s: float) -> None:
        """New end = now + timeout; may shorten; 0 expires at once. Raises `SandboxNotFound`."""

    async def snapshot(self, sandbox_id: str, name: str | None) -> SnapshotResult:
        """Capture a running (or paused) sandbox, commit, and let it go on long before this returns."""

    async def fork(self, sandbox_id: str, count: int, timeout_s: float) -> ForkResult:
        """Start `count` children of a running sandbox. `Conflict` when paused, `InvalidRequest` when out of range."""

    def get(self, sandbox_id: str) -> SandboxView:
        """Raises `SandboxNotFound`, whose text carries the tombstone's reason where there is one."""

    def tombstone(self, sandbox_id: str) -> Tombstone | None:
        """Why it ended, for a day."""

    def list_sandboxes(self) -> list[SandboxView]:
        """All live sandboxes (also paused ones), in no particular order."""

    def list_snapshots(self) -> list[SnapshotManifest]:
        """Committed snapshots of kind SNAPSHOT."""

    def list_templates(self) -> list[TemplateInfo]:
        """Committed snapshots of kind TEMPLATE."""

    def resolve_template(self, reference: str) -> SnapshotManifest:
        """By id, name, `name:tag` or snapshot id. Raises `TemplateNotFound`."""

    async def delete_snapshot(self, reference: str) -> None:
        """Hide a snapshot or template; its layers go when nothing needs them. Raises `TemplateNotFound`."""

    async def resolve_route(self, sandbox_id: str, port: int) -> RouteAnswer:
        """For the proxy; resumes first where the sandbox allows it. Never raises for an unknown sandbox."""

    def live_generations(self) -> tuple[list[int], int]:
        """Generations that may have streams, and the next generation that will be given out."""

    def describe(self) -> dict[str, Any]:
        """For health pages and `aenv doctor`: driver, accelerator and why, counts by state, capacity."""


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """Where the traffic of one (sandbox, port) goes."""

    address: str
    port: int
    generation: int
    traffic_token: str | None
    host_mask: str | None


@dataclass(frozen=True, slots=True)
class RouteRefusal:
    """Why there is no target: "not_found" (unknown, dead, or paused without auto-resume) or "in_transition"."""

    sandbox_id: str
    reason: str


RouteAnswer = RouteTarget | RouteRefusal

__all__ = [
    "ForkResult",
    "NodeInterface",
    "RouteAnswer",
    "RouteRefusal",
    "RouteTarget",
    "SandboxState",
    "SnapshotResult",
    "TemplateInfo",
]
