"""What is held stays and what nobody needs goes, over memory and over a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node, content_ids

from agentenv.clock import FakeClock
from agentenv.errors import Conflict, RepositoryDamaged, TemplateNotFound
from agentenv.snapshots import MemoryStore, Staging, Store, ids_of
from agentenv.snapshots.gclock import LOCK_KEY, LOCK_S, Timing
from agentenv.snapshots.holds import HOLD_S_MAX
from agentenv.snapshots.names import RESERVED_S


async def test_a_sweep_takes_what_only_a_removed_snapshot_needed(node: Node, store: Store) -> None:
    first = await node.snapshot("s1", b"base", b"one")
    second = await node.snapshot("s2", b"two", upon=first)
    await node.repository.remove("s1")
    report = await node.repository.sweep(0.0)
    assert report.removed_files == 2
    record = json.loads((await store.get("snapshots/s2.json")).content)
    assert await content_ids(store) == ids_of(second) | {record["manifest"]}
    await node.repository.remove("s2")
    await node.repository.sweep(0.0)
    assert await content_ids(store) == set()
    assert await store.stat(LOCK_KEY) is None


async def test_a_sweep_leaves_what_any_node_holds(node: Node, other: Node, store: Store) -> None:
    made = await node.snapshot("s1", b"one")
    await other.repository.refresh()
    await other.repository.hold_snapshot(made)
    await node.repository.remove("s1")
    await node.repository.sweep(0.0)
    assert ids_of(made) <= await content_ids(store)
    other.repository.release(ids_of(made))
    await other.repository.renew()
    await node.repository.sweep(0.0)
    assert await content_ids(store) == set()


async def test_a_snapshot_that_was_removed_cannot_be_held(node: Node, other: Node) -> None:
    made = await node.snapshot("s1", b"one")
    await other.repository.refresh()
    await node.repository.remove("s1")
    with pytest.raises(TemplateNotFound):
        await other.repository.hold_snapshot(made)
    assert other.repository.all() == []


async def test_a_blob_that_is_gone_cannot_be_held(node: Node) -> None:
    with pytest.raises(RepositoryDamaged):
        await node.repository.hold(["0" * 64])


async def test_holds_of_the_former_process_last_until_recovery_is_over(node: Node, store: Store) -> None:
    (layer,) = await node.publish(b"running sandbox")
    await node.restart()
    await node.publish(b"another, which writes the holds again")
    await node.repository.sweep(0.0)
    assert layer.digest in await content_ids(store)
    node.repository.settle()
    await node.repository.renew()
    await node.repository.sweep(0.0)
    assert layer.digest not in await content_ids(store)


async def test_a_hold_counts(node: Node, store: Store) -> None:
    (layer,) = await node.publish(b"one")
    await node.repository.hold([layer.digest])
    node.repository.release([layer.digest])
    await node.repository.renew()
    await node.repository.sweep(0.0)
    assert layer.digest in await content_ids(store)


async def test_the_grace_spares_what_is_young(node: Node, store: Store) -> None:
    (layer,) = await node.publish(b"one")
    node.repository.release([layer.digest])
    await node.repository.renew()
    report = await node.repository.sweep(3_600.0)
    assert (report.removed_files, report.young_files) == (0, 1)
    assert layer.digest in await content_ids(store)


async def test_a_sweepers_lock_keeps_others_away_until_it_is_over(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    lock = b'{"version":1,"node_id":"node-x","process":"p","nonce":"n"}'
    await store.put(LOCK_KEY, lock)
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.advance(seconds)

    node = Node("node-a", store, tmp_path / "a", Timing(clock.monotonic, sleep))
    with pytest.raises(Conflict, match="node-x"):
        await node.repository.sweep(0.0)
    await node.publish(b"one")
    assert LOCK_S < sum(waited) < LOCK_S + 5
    clock.advance(10)
    assert (await node.repository.sweep(0.0)).removed_files == 0
    assert await store.stat(LOCK_KEY) is None


async def test_a_sweep_that_the_same_node_did_not_survive_delays_nobody_here(tmp_path: Path) -> None:
    store = MemoryStore()
    node = Node("node-a", store, tmp_path / "a")
    await store.put(LOCK_KEY, b'{"version":1,"node_id":"node-a","process":"former","nonce":"n"}')
    await node.publish(b"one")
    await node.repository.sweep(0.0)
    assert await store.stat(LOCK_KEY) is None


def test_staging_collects_what_nobody_needs(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "staging")
    for layer in ("a", "b"):
        staging.layer(layer).write_bytes(b"x" * 4096)
    staging.state("c").write_bytes(b"x" * 4096)
    candidates = staging.stored_ids()
    staging.layer("newer").write_bytes(b"x")
    removed, freed_bytes = staging.collect(candidates, {"a"})
    assert (removed, freed_bytes) == (2, 8192)
    assert staging.stored_ids() == {"a", "newer"}
    assert staging.usage(["a"]).garbage_bytes == 4096


async def test_a_sweep_takes_traces_and_reservations_of_what_is_gone(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    node = Node("node-a", store, tmp_path / "a")
    await node.repository.load()
    await node.snapshot("s1", b"one")
    for snapshot_id in ("s1", "s2"):
        await store.put(f"traces/{snapshot_id}.json", b"[]")
    await node.repository.reserve_name("old:default")
    await store.put("gc/clock-0a.json", b"{}")
    clock.advance(RESERVED_S + 1)
    await node.repository.reserve_name("young:default")
    await node.repository.sweep(0.0)
    assert [entry.key for entry in await store.list("traces/")] == ["traces/s1.json"]
    assert [entry.key for entry in await store.list("names/")] == ["names/young%3Adefault.json"]
    assert await store.list("gc/") == []


async def test_a_node_that_is_no_more_holds_nothing_for_ever(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    node, other = Node("node-a", store, tmp_path / "a"), Node("node-b", store, tmp_path / "b")
    (layer,) = await other.publish(b"one")
    clock.advance(HOLD_S_MAX - 1)
    await node.repository.sweep(0.0)
    assert layer.digest in await content_ids(store)
    clock.advance(2)
    await node.repository.sweep(0.0)
    assert layer.digest not in await content_ids(store)
