"""Random lives of two nodes over one store, against a model that only knows what must be reachable.

snapshot, fork (a commit over shared layers), start and end of a sandbox, delete, sweep, restart
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.snapshots.lossy_files import Unsynced
from tests.unit.snapshots.repository_world import Node, content_ids

from agentenv.clock import FakeClock
from agentenv.errors import TemplateNotFound
from agentenv.model import SnapshotManifest
from agentenv.snapshots import MemoryStore, PosixStore, Store, ids_of, records
from agentenv.snapshots.gclock import Timing

# Few contents, so that equal layers meet often.
CONTENTS = st.sampled_from([b"a", b"b", b"c"])
NODES = st.sampled_from([0, 1])


@dataclass(slots=True)
class Sandbox:
    """Something that runs on a node and needs layers, whatever became of its snapshot."""

    node: int
    snapshot: SnapshotManifest
    # A sandbox whose server restarted is held anew by recovery.
    is_held: bool = True


@dataclass(slots=True)
class Model:
    """What must be there."""

    snapshots: dict[str, SnapshotManifest] = field(default_factory=dict)
    sandboxes: list[Sandbox] = field(default_factory=list)

    def needed(self) -> set[str]:
        ids: set[str] = set()
        for snapshot in [*self.snapshots.values(), *(sandbox.snapshot for sandbox in self.sandboxes)]:
            ids |= ids_of(snapshot)
        return ids


class Lives(RuleBasedStateMachine):
    """The machine; `make_store` is what differs."""

    def make_store(self, folder: Path) -> Store:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.store = self.make_store(Path(self.folder.name))
        self.model = Model()
        self.number = 0
        self.nodes = [self._node("node-a"), self._node("node-b")]

    def _node(self, name: str) -> Node:
        async def sleep(seconds: float) -> None:
            self.clock.advance(seconds)

        node = Node(name, self.store, Path(self.folder.name) / name, Timing(self.clock.monotonic, sleep), Unsynced())
        self.loop.run_until_complete(node.repository.load())
        return node

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()
            self.folder.cleanup()

    def _new_id(self) -> str:
        self.number += 1
        return f"s{self.number}"

    @rule(node=NODES, content=CONTENTS)
    def snapshot(self, node: int, content: bytes) -> None:
        snapshot_id = self._new_id()
        made = self.loop.run_until_complete(self.nodes[node].snapshot(snapshot_id, content))
        self.model.snapshots[snapshot_id] = made

    @precondition(lambda self: self.model.snapshots)
    @rule(node=NODES, data=st.data())
    def start(self, node: int, data: st.DataObject) -> None:
        """A sandbox from any snapshot, also one that another node made or removed behind this one's back."""
        chosen = self.model.snapshots[data.draw(st.sampled_from(sorted(self.model.snapshots)))]
        self.loop.run_until_complete(self.nodes[node].repository.hold_snapshot(chosen))
        self.model.sandboxes.append(Sandbox(node, chosen))

    @precondition(lambda self: self.model.sandboxes)
    @rule(data=st.data(), content=CONTENTS)
    def fork(self, data: st.DataObject, content: bytes) -> None:
        """A snapshot of a running sandbox, whose own snapshot may be deleted by now."""
        sandbox = data.draw(st.sampled_from(self.model.sandboxes))
        if not sandbox.is_held:
            return
        snapshot_id = self._new_id()
        node = self.nodes[sandbox.node]
        made = self.loop.run_until_complete(node.snapshot(snapshot_id, content, upon=sandbox.snapshot))
        self.model.snapshots[snapshot_id] = made

    @precondition(lambda self: self.model.sandboxes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sandbox = data.draw(st.sampled_from(self.model.sandboxes))
        self.model.sandboxes.remove(sandbox)
        if sandbox.is_held:
            self.nodes[sandbox.node].repository.release(ids_of(sandbox.snapshot))

    @precondition(lambda self: self.model.snapshots)
    @rule(node=NODES, data=st.data())
    def delete(self, node: int, data: st.DataObject) -> None:
        snapshot_id = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        self.loop.run_until_complete(self.nodes[node].repository.remove(snapshot_id))
        gone = self.model.snapshots.pop(snapshot_id)

        async def cannot_start() -> None:
            try:
                await self.nodes[1 - node].repository.hold_snapshot(gone)
            except TemplateNotFound:
                return
            # It runs there or is being held there: then its blobs are, which is enough.
            self.nodes[1 - node].repository.release(ids_of(gone))

        self.loop.run_until_complete(cannot_start())

    @rule(node=NODES)
    def sweep(self, node: int) -> None:
        self.loop.run_until_complete(self.nodes[node].repository.sweep(0.0))

    @rule(node=NODES)
    def renew(self, node: int) -> None:
        self.loop.run_until_complete(self.nodes[node].repository.renew())

    @rule(node=NODES)
    def restart(self, node: int) -> None:
        """The server's process ends; its sandboxes do not."""
        self.loop.run_until_complete(self.nodes[node].restart())
        for sandbox in self.model.sandboxes:
            if sandbox.node == node:
                sandbox.is_held = False

    @rule(node=NODES)
    def recover(self, node: int) -> None:
        """Recovery holds what the node's sandboxes need, then lets the rest go."""
        for sandbox in self.model.sandboxes:
            if sandbox.node == node and not sandbox.is_held:
                self.loop.run_until_complete(self.nodes[node].repository.hold(ids_of(sandbox.snapshot)))
                sandbox.is_held = True
        self.nodes[node].repository.settle()

    @invariant()
    def everything_needed_is_there(self) -> None:
        if hasattr(self, "loop"):
            stored = self.loop.run_until_complete(content_ids(self.store))
            assert self.model.needed() <= stored

    @invariant()
    def both_nodes_see_what_is_committed(self) -> None:
        if hasattr(self, "loop"):
            for node in self.nodes:
                self.loop.run_until_complete(node.repository.refresh())
                seen = {snapshot.snapshot_id: snapshot for snapshot in node.repository.all()}
                assert seen == self.model.snapshots

    @rule()
    def nothing_else_stays(self) -> None:
        """Once both recovered and told so, a sweep leaves what is reachable and nothing else."""
        for node in (0, 1):
            self.recover(node)
            self.loop.run_until_complete(self.nodes[node].repository.renew())
        self.sweep(0)
        # Equal descriptions are one manifest.
        manifests = {records.encode(snapshot)[2] for snapshot in self.model.snapshots.values()}
        stored = self.loop.run_until_complete(content_ids(self.store))
        assert stored == self.model.needed() | manifests


SETTINGS = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_lives_of_two_nodes_over_one_store() -> None:
    class InMemory(Lives):
        def make_store(self, folder: Path) -> Store:
            return MemoryStore(self.clock)

    run_state_machine_as_test(InMemory, settings=SETTINGS)


def test_lives_of_two_nodes_over_one_directory() -> None:
    class InDirectory(Lives):
        def make_store(self, folder: Path) -> Store:
            return PosixStore(folder / "repository", Unsynced())

    run_state_machine_as_test(InDirectory, settings=settings(SETTINGS, max_examples=10))
