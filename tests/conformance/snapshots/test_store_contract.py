"""What every store must do alike: the same tests over memory, a directory and a bucket."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.errors import StoreRefused
from agentenv.snapshots.stores import MemoryStore, ObjectNotFound, PreconditionFailed, Store
from agentenv.snapshots.stores.probe import probe


async def test_what_was_put_is_got_and_replaced(store: Store) -> None:
    first = await store.put("snapshots/s1.json", b"one")
    assert (await store.get("snapshots/s1.json")).content == b"one"
    assert (await store.get("snapshots/s1.json")).etag == first
    second = await store.put("snapshots/s1.json", b"two")
    assert second != first
    assert (await store.get("snapshots/s1.json")).content == b"two"


async def test_what_is_not_there_is_not_found(store: Store) -> None:
    with pytest.raises(ObjectNotFound):
        await store.get("snapshots/none.json")
    assert await store.stat("snapshots/none.json") is None
    assert await store.list("snapshots/") == []


async def test_an_empty_object_and_a_large_one_come_back_whole(store: Store) -> None:
    large = bytes(range(256)) * 40_000
    await store.put("states/a.state", b"")
    await store.put("states/b.state", large)
    assert (await store.get("states/a.state")).content == b""
    assert (await store.get("states/b.state")).content == large


async def test_only_an_absent_object_is_created(store: Store) -> None:
    await store.put("names/a.json", b"mine", if_absent=True)
    with pytest.raises(PreconditionFailed):
        await store.put("names/a.json", b"yours", if_absent=True)
    assert (await store.get("names/a.json")).content == b"mine"


async def test_a_repeated_creation_succeeds(store: Store) -> None:
    etag = await store.put("names/a.json", b"mine", if_absent=True)
    assert await store.put("names/a.json", b"mine", if_absent=True) == etag


async def test_only_the_expected_object_is_replaced(store: Store) -> None:
    first = await store.put("gc/lock.json", b"1")
    second = await store.put("gc/lock.json", b"2", if_match=first)
    with pytest.raises(PreconditionFailed):
        await store.put("gc/lock.json", b"3", if_match=first)
    with pytest.raises(PreconditionFailed):
        await store.put("gc/none.json", b"3", if_match=first)
    assert (await store.get("gc/lock.json")).etag == second


async def test_a_repeated_replacement_succeeds(store: Store) -> None:
    first = await store.put("gc/lock.json", b"1")
    second = await store.put("gc/lock.json", b"2", if_match=first)
    assert await store.put("gc/lock.json", b"2", if_match=first) == second


async def test_of_many_who_create_one_wins(store: Store) -> None:
    puts = (store.put("names/race.json", b"%d" % number, if_absent=True) for number in range(12))
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    assert all(isinstance(result, str | PreconditionFailed) for result in results)


async def test_of_many_who_replace_one_wins(store: Store) -> None:
    etag = await store.put("gc/race.json", b"before")
    puts = (store.put("gc/race.json", b"%d" % number, if_match=etag) for number in range(6))
    results = await asyncio.gather(*puts, return_exceptions=True)
    winners = [number for number, result in enumerate(results) if not isinstance(result, BaseException)]
    assert len(winners) == 1
    assert (await store.get("gc/race.json")).content == b"%d" % winners[0]


async def test_a_folder_is_listed_in_order_with_sizes(store: Store) -> None:
    for name in ("b", "a", "%C3%A4%2Fx%3Ay"):
        await store.put(f"names/{name}.json", b"x" * len(name))
    await store.put("namesake/c.json", b"not this")
    listed = await store.list("names/")
    assert [(entry.key, entry.size_bytes) for entry in listed] == [
        ("names/%C3%A4%2Fx%3Ay.json", 14),
        ("names/a.json", 1),
        ("names/b.json", 1),
    ]
    assert await store.stat("names/a.json") == listed[1]


async def test_times_are_of_the_last_put(store: Store) -> None:
    await store.put("gc/a.json", b"1")
    before = await store.stat("gc/a.json")
    await store.put("gc/b.json", b"1")
    after = await store.stat("gc/b.json")
    assert before is not None
    assert after is not None
    assert 0 <= after.modified_s - before.modified_s < 30


async def test_deletion_is_idempotent(store: Store) -> None:
    await store.put("snapshots/s1.json", b"one")
    await store.delete("snapshots/s1.json")
    await store.delete("snapshots/s1.json")
    assert await store.list("snapshots/") == []


async def test_more_objects_than_one_page_are_listed(store: Store) -> None:
    keys = [f"layers/{number:06d}.lsmt" for number in range(1_100)]
    for start in range(0, len(keys), 50):
        await asyncio.gather(*(store.put(key, b"") for key in keys[start : start + 50]))
    assert [entry.key for entry in await store.list("layers/")] == keys


@pytest.mark.parametrize("key", ["", "a", "/a/b", "a/../b", "a/.hidden", "a/b/c", "A/b", "a/b c", "a/"])
async def test_a_bad_key_is_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        await store.put(key, b"")


async def test_a_store_that_keeps_the_contract_passes_the_probe(store: Store) -> None:
    await probe(store, "here")
    assert await store.list("gc/") == []


@pytest.mark.parametrize(("ignored", "named"), [("if_absent", "If-None-Match"), ("if_match", "If-Match")])
async def test_a_store_that_ignores_conditions_is_refused(ignored: str, named: str) -> None:
    class Careless(MemoryStore):
        async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
            return await super().put(
                key,
                content,
                if_absent=if_absent and ignored != "if_absent",
                if_match=None if ignored == "if_match" else if_match,
            )

    with pytest.raises(StoreRefused, match=named):
        await probe(Careless(), "there")
