"""Token and plain digests in a manifest under a key, and the check that all nodes of a repository have the same one."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.snapshots.repository_world import described

from agentenv.errors import ConfigError, RepositoryDamaged
from agentenv.model import Blob, SnapshotManifest
from agentenv.snapshots import MemoryStore
from agentenv.snapshots.codec import SealedManifest
from agentenv.snapshots.index import Index
from agentenv.snapshots.sealing import CHECK_KEY, Sealer, check_key, seal, unseal

KEY, OTHER = "01" * 32, "02" * 32
PLAIN = "b" * 64


@pytest.fixture
def snapshot() -> SnapshotManifest:
    """Of an encrypted layer and a plain device state."""
    layer, state = Blob("a" * 64, 1, PLAIN, 1, encryption="aes-256-gcm"), Blob("c" * 64, 1, "c" * 64, 1)
    return dataclasses.replace(described("s1", [layer], state), token_owner="box", guest_token="5ec2e7")


def test_what_was_sealed_is_opened_by_the_same_key_alone(snapshot: SnapshotManifest) -> None:
    sealed = seal(snapshot, Sealer(KEY))
    assert "5ec2e7" not in sealed.guest_token
    assert sealed.blobs["a" * 64].plain_digest.startswith("aes-siv-1:")
    assert sealed.blobs["c" * 64] == snapshot.blobs["c" * 64]
    assert unseal(sealed, Sealer(KEY), "here") == snapshot
    for other in (Sealer(OTHER), None):
        with pytest.raises(SealedManifest, match=r"here: .*snapshot\.encryption_key_file"):
            unseal(sealed, other, "here")


def test_the_bytes_of_version_one(snapshot: SnapshotManifest) -> None:
    """A change here makes every encrypted repository unreadable."""
    sealed = seal(snapshot, Sealer(KEY))
    assert sealed.guest_token == "aes-siv-1:vUN1Hfyou04kHmMzSv2accJaIjxR3A=="
    assert sealed.blobs["a" * 64].plain_digest == (
        "aes-siv-1:ZfGGHKFEydVMWwRzZvBBvE0CJORunu2Orr9ZzXeuzvMCcHN7bBOg+dckJu8QJOOWMr797Q7D2i2l9GgnRn4CwlxIM6tzW7Vgz2YwMCWRuhQ="
    )
    assert Sealer(KEY).check == "58bdf77b727bbccf4309b2986b8f394ade3665277777e21d421794a98c6eba2d"


def test_equal_tokens_of_one_sandbox_are_one_text_and_of_another_one_are_not(snapshot: SnapshotManifest) -> None:
    again = dataclasses.replace(snapshot, snapshot_id="s2")
    stranger = dataclasses.replace(snapshot, token_owner="other")
    first = seal(snapshot, Sealer(KEY)).guest_token
    assert seal(again, Sealer(KEY)).guest_token == first
    assert seal(stranger, Sealer(KEY)).guest_token != first
    # Nor is it taken for the other's.
    with pytest.raises(SealedManifest):
        unseal(dataclasses.replace(stranger, guest_token=first), Sealer(KEY), "here")


@pytest.mark.parametrize("text", ["aes-siv-1:", "aes-siv-1:!", "aes-siv-1:AAAA", "aes-siv-1:é"])
def test_a_damaged_token_is_an_error(snapshot: SnapshotManifest, text: str) -> None:
    with pytest.raises(SealedManifest):
        unseal(dataclasses.replace(snapshot, guest_token=text), Sealer(KEY), "here")
    layer = dataclasses.replace(snapshot.blobs["a" * 64], plain_digest=text)
    with pytest.raises(SealedManifest):
        unseal(dataclasses.replace(snapshot, blobs={layer.digest: layer}), Sealer(KEY), "here")


def test_without_a_key_or_a_token_nothing_changes(snapshot: SnapshotManifest) -> None:
    assert seal(snapshot, None) is snapshot
    assert unseal(snapshot, None, "here") is snapshot
    # What was stored before there was a key.
    assert unseal(snapshot, Sealer(KEY), "here") is snapshot
    bare = dataclasses.replace(snapshot, guest_token="", blobs={})
    assert seal(bare, Sealer(KEY)) == bare


async def test_an_index_stores_the_sealed_and_knows_the_plain(snapshot: SnapshotManifest) -> None:
    store = MemoryStore()
    record, manifest, digest = Index(store, Sealer(KEY)).encoded(snapshot)
    await store.put(f"manifests/{digest}.json", manifest)
    await store.put("snapshots/s1.json", record)
    assert b"5ec2e7" not in manifest + record
    assert PLAIN.encode() not in manifest + record
    index = Index(store, Sealer(KEY)).fresh()
    assert await index.fetch("s1") == snapshot
    blind = Index(store)
    await blind.refresh()
    assert blind.all() == []
    assert isinstance(blind.broken()["s1"], SealedManifest)


async def test_the_first_node_with_a_key_says_which() -> None:
    store = MemoryStore()
    await check_key(store, None, "here")
    assert await store.list("keys/") == []
    for _ in range(2):
        await check_key(store, Sealer(KEY), "here")
    with pytest.raises(ConfigError, match=r"snapshot\.encryption_key_file.*here"):
        await check_key(store, Sealer(OTHER), "here")
    with pytest.raises(ConfigError, match=r"snapshot\.encryption_key_file is not set.*here"):
        await check_key(store, None, "here")
    assert KEY.encode() not in (await store.get(CHECK_KEY)).content
    await store.put(CHECK_KEY, b"{")
    with pytest.raises(RepositoryDamaged, match=r"keys/check\.json"):
        await check_key(store, Sealer(KEY), "here")


async def test_two_nodes_that_start_at_once_do_not_both_win() -> None:
    class Raced(MemoryStore):
        """Another node with another key comes between the look and the put."""

        is_alone = True

        async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
            if self.is_alone:
                self.is_alone = False
                await check_key(self, Sealer(OTHER), "here")
            return await super().put(key, content, if_absent=if_absent, if_match=if_match)

    with pytest.raises(ConfigError):
        await check_key(Raced(), Sealer(KEY), "here")
