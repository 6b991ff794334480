"""The committed repository as a node uses it, over memory and over a directory."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node, content_ids, described, make_store
from tests.unit.snapshots.test_catalog import MANIFEST

from agentenv.clock import FakeClock
from agentenv.errors import Conflict, OperationFailed, RepositoryDamaged, StoreUnavailable, TemplateNotFound
from agentenv.model import Blob
from agentenv.snapshots import MemoryStore, PosixStore, Staging, Store, encode_manifest, ids_of
from agentenv.snapshots.gclock import LOCK_KEY, LOCK_S, Timing
from agentenv.snapshots.holds import HOLD_S_MAX
from agentenv.snapshots.index import gathered
from agentenv.snapshots.names import RESERVED_S
from agentenv.snapshots.stores import Entry, Object


@pytest.fixture(params=["memory", "posix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return make_store(request.param, tmp_path)


@pytest.fixture
async def node(store: Store, tmp_path: Path) -> Node:
    made = Node("node-a", store, tmp_path / "a")
    await made.repository.load()
    return made


@pytest.fixture
async def other(store: Store, tmp_path: Path) -> Node:
    made = Node("node-b", store, tmp_path / "b")
    await made.repository.load()
    return made


async def test_a_committed_snapshot_is_the_same_after_a_restart(node: Node) -> None:
    made = await node.snapshot("s1", b"disk", b"memory")
    await node.restart()
    assert await node.repository.get("s1") == made
    assert made.node_id == "node-a"


async def test_another_node_sees_it_and_reads_only_what_is_new(node: Node, other: Node) -> None:
    first = await node.snapshot("s1", b"one")
    assert (await other.repository.refresh()).added == (first,)
    second = await node.snapshot("s2", b"two", upon=first)
    await node.repository.remove("s1")
    # Neither a look-up nor a sweep keeps anything from being told.
    await other.repository.get("s2")
    await other.repository.sweep(3_600.0)
    changes = await other.repository.refresh()
    assert (changes.added, changes.removed) == ((second,), ("s1",))
    assert await other.repository.get("s2") == second


async def test_a_snapshot_of_another_node_is_found_without_a_refresh(node: Node, other: Node) -> None:
    made = await node.snapshot("s1", b"one")
    assert await other.repository.get("s1") == made
    for nobody in ("s2", "../s1", "", "s1\n", "S1"):
        with pytest.raises(TemplateNotFound):
            await other.repository.get(nobody)


async def test_only_the_nodes_own_snapshots_are_asked_for(node: Node, other: Node) -> None:
    await node.snapshot("s1", b"one")
    await other.snapshot("s2", b"two")
    assert [s.snapshot_id for s in await node.repository.load("node-a")] == ["s1"]
    assert len(await node.repository.load()) == 2


async def test_equal_layers_are_one_blob(node: Node, store: Store) -> None:
    (first,) = await node.publish(b"same")
    (second,) = await node.publish(b"same")
    assert first == second
    assert [entry.key for entry in await store.list("layers/")] == [f"layers/{first.digest}.lsmt"]


async def test_what_was_never_published_is_not_committed(node: Node, store: Store) -> None:
    (layer,) = await node.publish(b"one")
    state = await node.repository.publish_state(node.device_state(b"s"))
    missing = Blob("0" * 64, 1, "0" * 64, 1)
    with pytest.raises(RepositoryDamaged, match="0000"):
        await node.repository.commit(described("s1", [layer, missing], state))
    with pytest.raises(OperationFailed, match="not published"):
        await node.repository.commit(replace(described("s2", [layer], state), blobs={}))
    assert await store.list("snapshots/") == []


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


async def test_a_record_that_cannot_be_read_is_skipped_and_stops_every_sweep(node: Node, store: Store) -> None:
    await node.snapshot("s1", b"one")
    await store.put("snapshots/s2.json", b'{"version":3,"who":"knows"}')
    await node.snapshot("s3", b"three")
    await node.restart()
    assert [s.snapshot_id for s in node.repository.all()] == ["s1", "s3"]
    with pytest.raises(RepositoryDamaged, match=r"snapshots/s2\.json"):
        await node.repository.get("s2")
    await node.repository.remove("s3")
    with pytest.raises(RepositoryDamaged, match=r"snapshots/s2\.json"):
        await node.repository.sweep(0.0)
    assert await store.stat(LOCK_KEY) is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version":2,"snapshot":{}}'])
async def test_a_damaged_manifest_damages_its_snapshot_only(node: Node, store: Store, damage: bytes) -> None:
    await node.snapshot("s1", b"one")
    good = await node.snapshot("s2", b"two")
    manifest = json.loads((await store.get("snapshots/s1.json")).content)["manifest"]
    await store.put(f"manifests/{manifest}.json", damage)
    await node.restart()
    assert node.repository.all() == [good]


async def test_records_under_another_name_are_damage(node: Node, store: Store) -> None:
    await node.snapshot("s1", b"one")
    await store.put("snapshots/s9.json", (await store.get("snapshots/s1.json")).content)
    await node.restart()
    assert [s.snapshot_id for s in node.repository.all()] == ["s1"]


async def test_version_one_is_read_and_its_layers_are_found(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    (root / "layers").mkdir(parents=True)
    (root / "snapshots").mkdir()
    layer, top, state = "a" * 24, "b" * 24, "c" * 24
    for name in (f"{layer}.lsmt", f"{top}.lsmt", f"{state}.state", f"{'d' * 24}.lsmt"):
        (root / "layers" / name).write_bytes(b"x")
    stacks = replace(MANIFEST.disk, layers=(layer,)), replace(MANIFEST.memory, layers=(top,))
    committed = replace(MANIFEST, disk=stacks[0], memory=stacks[1], device_state=state)
    (root / "snapshots" / f"{committed.snapshot_id}.json").write_bytes(encode_manifest(committed))
    node = Node("node-a", PosixStore(root), tmp_path / "a")
    assert await node.repository.load("node-a") == [committed]
    assert node.repository.path(layer) == root / "layers" / f"{layer}.lsmt"
    assert await node.repository.state(state) == root / "layers" / f"{state}.state"
    assert not node.repository.is_local(layer)
    assert node.repository.is_local("e" * 24)
    assert node.repository.path("e" * 24) == node.staging.layer("e" * 24)
    await node.repository.hold_snapshot(committed)
    await node.repository.sweep(0.0)
    assert {p.name for p in (root / "layers").iterdir()} == {f"{layer}.lsmt", f"{top}.lsmt", f"{state}.state"}


async def test_a_snapshot_of_today_may_lie_upon_layers_of_version_one(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    old = root / "layers" / f"{'a' * 24}.lsmt"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x")
    node = Node("node-a", PosixStore(root), tmp_path / "a")
    await node.repository.load()
    (layer,) = await node.publish(b"new")
    state = await node.repository.publish_state(node.device_state(b"s"))
    manifest = described("s1", [layer], state)
    await node.repository.commit(replace(manifest, disk=replace(manifest.disk, layers=("a" * 24, layer.digest))))
    await node.repository.sweep(0.0)
    assert old.exists()


async def test_a_local_file_becomes_a_blob_without_a_copy(tmp_path: Path) -> None:
    node = Node("node-a", PosixStore(tmp_path / "repository"), tmp_path / "a")
    await node.repository.load()
    local = node.layer(b"one")
    blob = await node.repository.publish_layer(local)
    assert node.repository.path(blob.digest).samefile(local)


async def test_a_remote_layer_is_described_for_blockd(tmp_path: Path) -> None:
    node = Node("node-a", MemoryStore(), tmp_path / "a")
    made = await node.snapshot("s1", b"one")
    digest = made.disk.layers[0]
    node.repository.know([replace(made.blobs[digest], blocks_digest="b" * 64)])
    path = node.repository.path(digest)
    assert path == tmp_path / "a" / "blobs" / f"{digest}.blob"
    assert path.read_bytes().startswith(b'{"aenv_blob":1')
    assert json.loads(path.read_bytes()) == {
        "aenv_blob": 1,
        "digest": digest,
        "size_bytes": 3,
        "source": {"kind": "object", "store": "repository", "key": f"layers/{digest}.lsmt"},
        "block_bytes": 65536,
        "blocks": {"kind": "object", "store": "repository", "key": f"layers/{digest}.blocks"},
        "blocks_digest": "b" * 64,
        "encryption": None,
    }
    path.unlink()
    assert node.repository.path(digest).exists()
    with pytest.raises(RepositoryDamaged):
        node.repository.path("0" * 64)


async def test_a_remote_device_state_is_fetched_verified_and_fetched_again_when_it_was_torn(tmp_path: Path) -> None:
    store = MemoryStore()
    node = Node("node-a", store, tmp_path / "a")
    made = await node.snapshot("s1", b"one")
    path = await node.repository.state(made.device_state)
    assert path.read_bytes() == b"state of one"
    path.write_bytes(b"state")
    assert (await node.repository.state(made.device_state)).read_bytes() == b"state of one"
    path.unlink()
    await store.put(f"states/{made.device_state}.state", b"other")
    with pytest.raises(RepositoryDamaged, match="other content"):
        await node.repository.state(made.device_state)


async def test_a_name_is_reserved_once_until_it_is_released(node: Node, other: Node) -> None:
    reservation = await node.repository.reserve_name("ns/base:v1.0")
    with pytest.raises(Conflict, match="being made"):
        await other.repository.reserve_name("ns/base:v1.0")
    await node.repository.release_name(reservation)
    again = await other.repository.reserve_name("ns/base:v1.0")
    await node.repository.release_name(reservation)
    with pytest.raises(Conflict):
        await node.repository.reserve_name("ns/base:v1.0")
    await other.repository.release_name(again)


async def test_a_reservation_of_a_former_process_is_void(node: Node) -> None:
    await node.repository.reserve_name("base:default")
    await node.restart()
    await node.repository.reserve_name("base:default")


async def test_a_reservation_of_a_dead_node_runs_out_unless_it_is_renewed(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    node, other = Node("node-a", store, tmp_path / "a"), Node("node-b", store, tmp_path / "b")
    await node.repository.reserve_name("base:default")
    clock.advance(RESERVED_S - 1)
    await node.repository.renew()
    clock.advance(RESERVED_S - 1)
    with pytest.raises(Conflict):
        await other.repository.reserve_name("base:default")
    clock.advance(2)
    await other.repository.reserve_name("base:default")
    await node.repository.renew()
    with pytest.raises(Conflict):
        await node.repository.reserve_name("base:default")


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


async def test_a_record_whose_answer_was_lost_is_taken_back(tmp_path: Path) -> None:
    class Deaf(MemoryStore):
        async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
            etag = await super().put(key, content, if_absent=if_absent, if_match=if_match)
            if key.startswith("snapshots/"):
                raise StoreUnavailable("the answer was lost")
            return etag

    store = Deaf()
    node = Node("node-a", store, tmp_path / "a")
    with pytest.raises(StoreUnavailable):
        await node.snapshot("s1", b"one")
    assert await store.list("snapshots/") == []
    assert node.repository.all() == []


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


async def test_a_cancel_at_any_operation_holds_nothing_and_leaves_nothing_half(tmp_path: Path) -> None:
    class Cancelling(MemoryStore):
        """Cancels the task that asks at the n-th operation, which is carried out or not."""

        left = -1

        async def _step(self) -> None:
            self.left -= 1
            if self.left == 0:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

        async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
            etag = await super().put(key, content, if_absent=if_absent, if_match=if_match)
            await self._step()
            return etag

        async def get(self, key: str) -> Object:
            await self._step()
            return await super().get(key)

        async def stat(self, key: str) -> Entry | None:
            await self._step()
            return await super().stat(key)

    store = Cancelling()
    node = Node("node-a", store, tmp_path)
    await node.repository.load()
    store.left = 1_000
    await node.snapshot("s0", b"first")
    count = 1_000 - store.left
    assert count > 10
    for number in range(1, count + 1):
        store.left = number
        task = asyncio.create_task(node.snapshot(f"s{number}", b"layer %d" % number))
        with pytest.raises(asyncio.CancelledError):
            await task
        store.left = -1
        await node.repository.refresh()
        for snapshot in node.repository.all():
            assert ids_of(snapshot) <= await content_ids(store)
        await node.repository.sweep(0.0)
        needed = set().union(*(ids_of(snapshot) for snapshot in node.repository.all()))
        assert len(await content_ids(store) - needed) == len(node.repository.all())


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


def test_a_loop_that_ends_amid_reads_leaves_no_coroutine_behind(recwarn: pytest.WarningsRecorder) -> None:
    async def read(_key: str) -> None:
        await asyncio.sleep(600)

    async def main() -> list[asyncio.Task[list[None]]]:
        # The reads' own tasks are made when the loop goes round for the last time, and never begin.
        return [asyncio.create_task(gathered(["a", "b"], read))]

    asyncio.run(main()).clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
