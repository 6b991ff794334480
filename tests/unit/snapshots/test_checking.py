"""What `usage`, `verify` and `repair` say of a repository, and what a repair may touch."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import FakeDigester, Node, content_ids, described

from agentenv.errors import StoreUnavailable
from agentenv.model import Damage, Progress, SnapshotKind
from agentenv.snapshots import CommittedRepository, ConvertedLayers, MemoryStore, PlainPublisher, Process, Store, ids_of
from agentenv.snapshots.blobs import layer_key, manifest_key, state_key
from agentenv.snapshots.index import Index
from agentenv.snapshots.stores.interface import Entry
from agentenv.snapshots.usage import measure


def ignored(_: Progress) -> None:
    """Nobody looks."""


async def damages_of(repository: CommittedRepository) -> list[Damage]:
    return list((await repository.verify(ignored)).damages)


async def test_usage_counts_everything_once_and_knows_garbage(node: Node, store: Store) -> None:
    base = await node.snapshot("s1", b"b" * 8192)
    await node.snapshot("s2", b"t" * 8192, upon=base)
    await node.publish(b"held" * 2048)
    (garbage,) = await node.publish(b"g" * 8192)
    node.repository.release([garbage.digest])
    await node.repository.renew()
    usage = await node.repository.usage()
    assert usage.shared_bytes == 8192
    assert usage.garbage_bytes == 8192
    assert usage.size_bytes >= 4 * 8192
    listed = [
        entry for folder in ("layers/", "states/", "manifests/", "snapshots/") for entry in await store.list(folder)
    ]
    assert usage.files >= len(listed)


async def test_a_whole_repository_has_no_damage(node: Node) -> None:
    await node.snapshot("s1", b"one")
    seen: list[Progress] = []
    report = await node.repository.verify(seen.append)
    assert report.damages == ()
    # One record with its manifest, one layer, one state.
    assert report.checked_files == 4
    assert seen


async def test_a_damaged_layer_names_everything_that_needs_it(node: Node, store: Store) -> None:
    base = await node.snapshot("s1", b"base")
    await node.snapshot("s2", b"top", upon=base)
    converted = ConvertedLayers(store, node.repository)
    await converted.put("c" * 64, node.layer(b"base"), None)
    digest = base.disk.layers[0]
    await store.put(layer_key(digest), b"other")
    (damage,) = await damages_of(node.repository)
    assert damage.item == layer_key(digest)
    assert damage.dependents == ("snapshot s1", "snapshot s2", f"image {'c' * 64}")


async def test_missing_layers_and_states_are_named_with_templates_and_sandboxes(node: Node, store: Store) -> None:
    layers = await node.publish(b"one")
    state = await node.repository.publish_state(node.device_state(b"s"))
    template = replace(described("s1", layers, state), kind=SnapshotKind.TEMPLATE)
    pause = replace(described("s2", layers, state), kind=SnapshotKind.PAUSE, source_sandbox_id="i1")
    await node.repository.commit(template)
    await node.repository.commit(pause)
    await store.delete(state_key(state.digest))
    await store.delete(layer_key(layers[0].digest))
    found = await damages_of(node.repository)
    assert {damage.item for damage in found} == {state_key(state.digest), layer_key(layers[0].digest)}
    assert {damage.dependents for damage in found} == {("sandbox i1", "template s1:default")}


async def test_a_damaged_manifest_is_written_again_by_who_still_knows_it(node: Node, store: Store) -> None:
    made = await node.snapshot("s1", b"one")
    manifest = json.loads((await store.get("snapshots/s1.json")).content)["manifest"]
    await store.put(manifest_key(manifest), b"{")
    report = await node.repository.repair(ignored)
    assert [damage.repaired for damage in report.damages] == [True]
    assert await damages_of(node.repository) == []
    await node.restart()
    assert node.repository.all() == [made]


async def test_a_record_that_nobody_knows_is_put_aside_with_all_that_it_needs(node: Node, store: Store) -> None:
    made = await node.snapshot("s1", b"one")
    record = (await store.get("snapshots/s1.json")).content
    await store.put("snapshots/s1.json", record.replace(b'"version": 2', b'"version": true'))
    await node.restart()
    report = await node.repository.repair(ignored)
    assert [damage.repaired for damage in report.damages] == [True]
    assert await store.list("snapshots/") == []
    node.repository.settle()
    await node.repository.sweep(0.0)
    assert ids_of(made) <= await content_ids(store)
    # A person mends it.
    await store.put("snapshots/s1.json", record)
    assert await node.repository.get("s1") == made


async def test_a_newer_servers_record_is_no_damage(node: Node, store: Store) -> None:
    await store.put("snapshots/s9.json", b'{"version":3}')
    assert (await node.repository.repair(ignored)).damages == ()
    assert await store.stat("snapshots/s9.json") is not None


async def test_a_missing_blob_is_published_again_from_staging(tmp_path: Path) -> None:
    store = MemoryStore()
    node = Node("node-a", store, tmp_path / "a")
    repository = CommittedRepository(
        store, PlainPublisher(store), node.staging, tmp_path / "blobs", Process("node-a"), digester=FakeDigester()
    )
    node.repository = repository
    await repository.load()
    made = await node.snapshot("s1", b"one")
    lost = await node.snapshot("s2", b"two")
    await store.put(layer_key(made.disk.layers[0]), b"damaged")
    await store.delete(state_key(made.device_state))
    await store.delete(layer_key(lost.disk.layers[0]))
    for path in node.staging.layers_dir.iterdir():
        if path.read_bytes() == b"two":
            path.unlink()
    report = await repository.repair(ignored)
    assert {damage.item: damage.repaired for damage in report.damages} == {
        layer_key(made.disk.layers[0]): True,
        state_key(made.device_state): True,
        layer_key(lost.disk.layers[0]): False,
    }
    assert [damage.item for damage in await damages_of(repository)] == [layer_key(lost.disk.layers[0])]


async def test_a_converted_layer_is_kept_until_it_is_forgotten(node: Node, store: Store) -> None:
    converted = ConvertedLayers(store, node.repository)
    made = await converted.put("a" * 64, node.layer(b"base"), None)
    over = await converted.put("b" * 64, node.layer(b"over"), made.blob.digest)
    await node.restart()
    again = ConvertedLayers(store, node.repository)
    node.repository.settle()
    await node.repository.sweep(0.0)
    assert await again.get("b" * 64) == over
    assert await again.all() == {"a" * 64: made, "b" * 64: over}
    await again.remove("a" * 64)
    await node.repository.sweep(0.0)
    assert await again.get("a" * 64) is None
    # The other one lies upon it.
    assert await content_ids(store) == {made.blob.digest, over.blob.digest}
    await node.restart()
    node.repository.settle()
    await ConvertedLayers(store, node.repository).remove("b" * 64)
    await node.repository.sweep(0.0)
    assert await content_ids(store) == set()


async def test_a_converted_layer_whose_blob_is_gone_is_converted_again(node: Node, store: Store) -> None:
    converted = ConvertedLayers(store, node.repository)
    made = await converted.put("a" * 64, node.layer(b"base"), None)
    await store.delete(layer_key(made.blob.digest))
    await node.restart()
    assert await ConvertedLayers(store, node.repository).get("a" * 64) is None


class Silent(MemoryStore):
    """Takes every request and answers none."""

    async def stat(self, key: str) -> Entry | None:
        """See `Store.stat`."""
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def test_a_store_that_says_nothing_is_unavailable_before_its_requests_give_up() -> None:
    store = Silent()
    with pytest.raises(StoreUnavailable, match=r"has not answered within 0\.01 s"):
        await measure(store, Index(store), "s3://bucket", answer_s_max=0.01)
