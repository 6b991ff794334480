"""The committed repository as a node uses it, over memory and over a directory: its records."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node, content_ids, described

from agentenv.errors import OperationFailed, RepositoryDamaged, StoreUnavailable, TemplateNotFound
from agentenv.model import Blob
from agentenv.snapshots import MemoryStore, Store, ids_of
from agentenv.snapshots.gclock import LOCK_KEY
from agentenv.snapshots.index import gathered
from agentenv.snapshots.stores import Entry, Object


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


async def test_what_was_never_published_is_not_committed(node: Node, store: Store) -> None:
    (layer,) = await node.publish(b"one")
    state = await node.repository.publish_state(node.device_state(b"s"))
    missing = Blob("0" * 64, 1, "0" * 64, 1)
    with pytest.raises(RepositoryDamaged, match="0000"):
        await node.repository.commit(described("s1", [layer, missing], state))
    with pytest.raises(OperationFailed, match="not published"):
        await node.repository.commit(replace(described("s2", [layer], state), blobs={}))
    assert await store.list("snapshots/") == []


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


def test_a_loop_that_ends_amid_reads_leaves_no_coroutine_behind(recwarn: pytest.WarningsRecorder) -> None:
    async def read(_key: str) -> None:
        await asyncio.sleep(600)

    async def main() -> list[asyncio.Task[list[None]]]:
        # The reads' own tasks are made when the loop goes round for the last time, and never begin.
        return [asyncio.create_task(gathered(["a", "b"], read))]

    asyncio.run(main()).clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
