"""Where a node finds the bytes of layers and device states, those of the first version too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node, described
from tests.unit.snapshots.test_catalog import MANIFEST

from agentenv.errors import RepositoryDamaged
from agentenv.snapshots import MemoryStore, PosixStore, Store, encode_manifest


async def test_equal_layers_are_one_blob(node: Node, store: Store) -> None:
    (first,) = await node.publish(b"same")
    (second,) = await node.publish(b"same")
    assert first == second
    assert [entry.key for entry in await store.list("layers/")] == [f"layers/{first.digest}.lsmt"]


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
