"""The node beside other nodes: what it publishes, relies on, lets go of, and learns of."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.unit.node.conftest import World, spec

from agentenv.block.wire import ExportFailure, ExportInfo
from agentenv.errors import StoreUnavailable, TemplateNotFound
from agentenv.lifecycle import Phase
from agentenv.model import SandboxView, SnapshotManifest
from agentenv.node.record import memory_export_name
from agentenv.snapshots import CommittedRepository, PlainPublisher, PosixStore, Process, Staging, ids_of, is_digest


async def other_node(world: World, tmp_path: Path) -> CommittedRepository:
    """Another node's view of the same repository."""
    store = PosixStore(world.store.root)
    staging = Staging(tmp_path / "other" / "staging")
    repository = CommittedRepository(store, PlainPublisher(store), staging, tmp_path / "other" / "blobs", Process("n2"))
    await repository.load()
    return repository


async def test_what_a_snapshot_names_is_content_addressed_and_described(world: World, sandbox: SandboxView) -> None:
    manifest = (await world.node.snapshot(sandbox.sandbox_id, "shot")).manifest
    ids = ids_of(manifest)
    assert all(is_digest(layer_id) for layer_id in ids)
    assert ids == manifest.blobs.keys()
    assert manifest.node_id == "n1"
    assert manifest.parent_snapshot_id == world.node.resolve_template("base").snapshot_id


async def test_a_second_snapshot_does_not_publish_the_first_ones_layers_again(
    world: World, sandbox: SandboxView
) -> None:
    await world.node.snapshot(sandbox.sandbox_id, None)
    [sealed] = [i for i in world.owner(sandbox.sandbox_id).record.disk.layers if not is_digest(i)]
    # Gone from staging, it could not be hashed again.
    world.staging.layer(sealed).unlink()
    second = (await world.node.snapshot(sandbox.sandbox_id, None)).manifest
    assert world.host.layers._published[sealed].digest in second.disk.layers


async def test_a_snapshot_of_another_node_is_found_when_it_is_asked_for(world: World, tmp_path: Path) -> None:
    other = await other_node(world, tmp_path)
    template = world.node.resolve_template("base")
    theirs = replace(template, snapshot_id="s" + "b" * 20, names=("theirs:default",), created_at=5.0)
    await other.commit(theirs)
    made = await world.node.create(spec(template="theirs"))
    assert made.template_id == theirs.snapshot_id


async def test_a_snapshot_that_another_node_removed_cannot_be_started_from(world: World, tmp_path: Path) -> None:
    """The catalog still knows it, and nothing of it is held here."""
    other = await other_node(world, tmp_path)
    template = world.node.resolve_template("base")
    world.host.layers.let_go(set())
    await world.repository.renew()
    await other.remove(template.snapshot_id)
    with pytest.raises(TemplateNotFound):
        await world.node.create(spec())
    assert world.owners() == []


async def test_another_nodes_sweep_spares_what_runs_here(world: World, sandbox: SandboxView, tmp_path: Path) -> None:
    other = await other_node(world, tmp_path)
    await other.remove(world.node.resolve_template("base").snapshot_id)
    await other.sweep(0.0)
    record = world.owner(sandbox.sandbox_id).record
    needed = {*record.disk.layers, *record.memory.layers}
    assert needed <= world.stored_ids()
    await world.node.kill(sandbox.sandbox_id)
    await world.gone(sandbox.sandbox_id)
    await world.node._follower.look()
    await world.node._collector.sweep()
    await world.repository.renew()
    await other.sweep(0.0)
    assert not needed & world.stored_ids()


async def test_a_pause_outlives_another_nodes_sweep(world: World, sandbox: SandboxView, tmp_path: Path) -> None:
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    await world.idle(sandbox.sandbox_id)
    await world.node._collector.sweep()
    await world.repository.renew()
    await (await other_node(world, tmp_path)).sweep(0.0)
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


async def test_a_durable_pause_gives_its_local_copies_back(world: World, sandbox: SandboxView) -> None:
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    await world.idle(sandbox.sandbox_id)
    await world.node._collector.sweep()
    assert world.staging.stored_ids() == set()


async def test_a_record_that_cannot_go_now_goes_with_a_later_sweep(
    world: World, sandbox: SandboxView, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    await world.idle(sandbox.sandbox_id)

    async def out(snapshot_id: str) -> None:
        raise StoreUnavailable("out")

    with monkeypatch.context() as patch:
        patch.setattr(world.repository, "remove", out)
        assert (await world.node.connect(sandbox.sandbox_id, 60))[1]
    assert [m.kind for m in world.repository.all() if m.kind == "pause"] == ["pause"]
    await world.collect()
    assert [m.kind for m in world.repository.all() if m.kind == "pause"] == []


async def test_a_name_is_reserved_before_the_capture(world: World, sandbox: SandboxView) -> None:
    reserved: list[str] = []
    reserve = world.repository.reserve_name

    async def noted(name: str) -> object:
        reserved.append(f"{name} while {world.owner(sandbox.sandbox_id).phase.value}")
        return await reserve(name)

    world.repository.reserve_name = noted  # type: ignore[method-assign, assignment]
    await world.node.snapshot(sandbox.sandbox_id, "shot")
    assert reserved == ["shot:default while running"]
    # It is let go afterwards, so that the name can move on.
    await world.node.snapshot(sandbox.sandbox_id, "shot")


async def test_a_collection_between_publication_and_commit_takes_nothing(
    world: World, sandbox: SandboxView, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = world.repository.commit

    async def late(manifest: SnapshotManifest) -> SnapshotManifest:
        await world.collect()
        world.host.layers.ask_for_sweep()
        await world.collect()
        return await commit(manifest)

    monkeypatch.setattr(world.repository, "commit", late)
    manifest = (await world.node.snapshot(sandbox.sandbox_id, None)).manifest
    assert ids_of(manifest) <= world.stored_ids()
    await asyncio.sleep(0)


async def test_a_vmm_that_lost_its_memory_to_the_store_has_a_tombstone_that_says_so(
    world: World, sandbox: SandboxView
) -> None:
    owner = world.owner(sandbox.sandbox_id)
    image = memory_export_name(owner.record.memory.image_id)
    exports = await world.block.exports()
    failed = [
        msgspec.structs.replace(e, failure=ExportFailure("store repository: no answer", 40)) if e.name == image else e
        for e in exports
    ]

    async def told() -> list[ExportInfo]:
        return failed

    world.block.exports = told  # type: ignore[method-assign]
    [pid] = world.vmms.processes
    world.vmms.end(pid, "killed by SIGBUS")
    await world.gone(sandbox.sandbox_id)
    tombstone = world.node.tombstone(sandbox.sandbox_id)
    assert tombstone is not None
    assert tombstone.reason == "storage_lost"
    assert "store repository: no answer" in tombstone.detail


async def test_a_registry_that_serves_layers_is_made_known_before_they_are_used(world: World) -> None:
    origin = {"kind": "registry", "registry": "r:5000", "repository": "x", "digest": "sha256:" + "d" * 64}
    template = world.node.resolve_template("base")
    world.host.layers.let_go(set())
    blobs = {d: replace(b, origin=origin) if d in template.disk.layers else b for d, b in template.blobs.items()}
    await world.host.layers.hold_snapshot(replace(template, blobs=blobs))
    assert world.origins == [origin]
