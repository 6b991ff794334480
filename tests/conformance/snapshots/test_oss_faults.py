"""A bucket behind a proxy that makes faults: every request of every operation fails once, in every way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from tests.conformance.snapshots.conftest import oss_settings
from tests.support.fault_proxy import (
    SLOW_DOWN,
    Fault,
    FaultProxy,
    Reset,
    Stall,
    Status,
    Truncate,
    WrongEtag,
    proxy_in_thread,
)
from tests.support.s3 import S3Server
from tests.unit.snapshots.repository_world import Node, content_ids

from agentenv.errors import ConfigError, OperationFailed, StoreRefused, StoreUnavailable
from agentenv.snapshots import ids_of
from agentenv.snapshots.stores import ObjectNotFound, PreconditionFailed
from agentenv.snapshots.stores.credentials import Credentials
from agentenv.snapshots.stores.oss import OssSettings, OssStore, Patience

PASSING: list[Fault] = [Status(500), SLOW_DOWN, Stall(), Reset(), Reset(carried_out=True)]
# A short answer to a PUT is no fault: nothing in it is needed but its head.
BODY: list[Fault] = [Truncate(0), Truncate(1)]
QUICK = Patience(request_s_max=1.0, operation_s_max=5.0, retry_s_first=0.01)


@pytest.fixture
async def proxy(s3: S3Server) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(s3.host, s3.port) as made:
        yield made


@pytest.fixture
def settings(s3: S3Server, proxy: FaultProxy) -> OssSettings:
    return dataclasses.replace(oss_settings(s3), endpoint=proxy.url)


@pytest.fixture
def store(settings: OssSettings) -> OssStore:
    return OssStore(settings, QUICK)


OPERATIONS: dict[str, Callable[[OssStore], Awaitable[object]]] = {
    "get": lambda store: store.get("snapshots/a.json"),
    "put": lambda store: store.put("snapshots/b.json", b"b"),
    "create": lambda store: store.put("snapshots/c.json", b"c", if_absent=True),
    "list": lambda store: store.list("snapshots/"),
    "stat": lambda store: store.stat("snapshots/a.json"),
    "delete": lambda store: store.delete("snapshots/d.json"),
}


@pytest.mark.parametrize("fault", PASSING, ids=repr)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_what_fails_once_is_repeated(store: OssStore, proxy: FaultProxy, name: str, fault: Fault) -> None:
    for key in "ad":
        await store.put(f"snapshots/{key}.json", key.encode())
    proxy.fail(fault, at=1)
    before = len(proxy.requests)
    await OPERATIONS[name](store)
    assert len(proxy.requests) - before >= 2
    listed = {entry.key.rpartition("/")[2][0] for entry in await store.list("snapshots/")}
    assert listed == {"a", "d"} ^ {"put": {"b"}, "create": {"c"}, "delete": {"d"}}.get(name, set())
    assert (await store.get("snapshots/a.json")).content == b"a"


@pytest.mark.parametrize("fault", BODY, ids=repr)
@pytest.mark.parametrize("name", ["get", "list"])
async def test_a_short_body_is_read_again(store: OssStore, proxy: FaultProxy, name: str, fault: Fault) -> None:
    await store.put("snapshots/a.json", b"all of it")
    expected = await OPERATIONS[name](store)
    proxy.fail(fault, at=1)
    assert await OPERATIONS[name](store) == expected


@pytest.mark.parametrize("fault", PASSING, ids=repr)
async def test_a_conditional_replacement_whose_answer_is_lost_knows_its_own(
    store: OssStore, proxy: FaultProxy, fault: Fault
) -> None:
    first = await store.put("gc/lock.json", b"1")
    proxy.fail(fault, at=1)
    second = await store.put("gc/lock.json", b"2", if_match=first)
    assert (await store.get("gc/lock.json")).etag == second
    with pytest.raises(PreconditionFailed):
        await store.put("gc/lock.json", b"3", if_match=first)


async def test_a_wrong_etag_never_replaces_anothers_object(store: OssStore, proxy: FaultProxy) -> None:
    proxy.fail(WrongEtag(), at=1)
    etag = await store.put("gc/lock.json", b"1")
    with pytest.raises(PreconditionFailed):
        await store.put("gc/lock.json", b"2", if_match=etag)
    assert (await store.get("gc/lock.json")).content == b"1"


@pytest.mark.parametrize("fault", [Status(500), SLOW_DOWN, Stall(), Reset()], ids=repr)
async def test_a_store_that_is_away_is_unavailable_within_the_deadline(
    settings: OssSettings, proxy: FaultProxy, fault: Fault
) -> None:
    store = OssStore(settings, Patience(request_s_max=0.2, operation_s_max=0.8, retry_s_first=0.01))
    proxy.fail(fault, when=lambda _: True, times=-1)
    for operation in OPERATIONS.values():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"s3://.*0\.8 s"):
            await operation(store)
        assert time.monotonic() - began < 5.0
    proxy.heal()
    with pytest.raises(ObjectNotFound):
        await store.get("snapshots/a.json")


async def test_nobody_listens(settings: OssSettings) -> None:
    store = OssStore(
        dataclasses.replace(settings, endpoint="http://127.0.0.1:9"), Patience(request_s_max=0.2, operation_s_max=0.5)
    )
    with pytest.raises(StoreUnavailable):
        await store.list("snapshots/")


async def test_denied_access_is_told_at_once(store: OssStore, proxy: FaultProxy) -> None:
    proxy.fail(Status(403, b"<Error><Code>AccessDenied</Code></Error>"), at=1)
    with pytest.raises(StoreRefused, match="denied"):
        await store.put("snapshots/a.json", b"")


async def test_a_bucket_that_is_not_there_is_told(settings: OssSettings) -> None:
    store = OssStore(dataclasses.replace(settings, bucket="nowhere"), QUICK)
    for name in ("put", "create"):
        with pytest.raises(StoreRefused, match="bucket"):
            await OPERATIONS[name](store)


async def test_an_object_that_is_far_too_large_is_not_read(store: OssStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.snapshots.stores.oss.OBJECT_BYTES_MAX", 3)
    await store.put("snapshots/a.json", b"four")
    with pytest.raises(OperationFailed, match="4 bytes"):
        await store.get("snapshots/a.json")


async def test_keys_that_are_given_are_not_mixed_with_the_environments(
    settings: OssSettings, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "env-id",
        "AWS_SECRET_ACCESS_KEY": "env-secret",
        "AWS_SESSION_TOKEN": "env-token",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_REGION": "elsewhere",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    await OssStore(settings, QUICK).put("snapshots/a.json", b"")
    assert "Credential=test/" in proxy.requests[-1].headers["authorization"]
    assert f"/{settings.region}/" in proxy.requests[-1].headers["authorization"]
    assert "x-amz-security-token" not in proxy.requests[-1].headers
    # Without any the chain begins with the environment.
    await OssStore(dataclasses.replace(settings, credentials=None), QUICK).put("snapshots/a.json", b"")
    assert "Credential=env-id/" in proxy.requests[-1].headers["authorization"]
    assert proxy.requests[-1].headers["x-amz-security-token"] == "env-token"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("https://h:1", "https://b.h:1"), ("https://h/", "https://b.h"), ("https://b.h", "https://b.h")],
)
async def test_a_virtual_address_has_the_buckets_name_in_front(endpoint: str, expected: str) -> None:
    virtual = OssSettings("b", "r", endpoint, "virtual", credentials=Credentials("id", "secret"))
    with pytest.raises(StoreUnavailable, match=f"PUT {expected}/gc/a.json"):
        await OssStore(virtual, Patience(request_s_max=0.2, operation_s_max=0.5)).put("gc/a.json", b"")


@pytest.mark.parametrize("missing", ["region", "bucket"])
def test_what_must_be_given_is_named(missing: str) -> None:
    given = {"bucket": "b", "region": "r"} | {missing: ""}
    with pytest.raises(ConfigError, match=rf"snapshot\.oss\.{missing}"):
        OssSettings(**given)


async def _world(store: OssStore, folder: Path) -> Node:
    node = Node("node-a", store, folder)
    await node.repository.load()
    return node


async def _life(node: Node, store: OssStore) -> None:
    """Snapshot, delete, the same again, sweep."""
    base = await node.snapshot("s1", b"base")
    await node.repository.remove("s1")
    kept = await node.snapshot("s2", b"base")
    await node.repository.sweep(0.0)
    assert [s.snapshot_id for s in node.repository.all()] == ["s2"]
    assert ids_of(kept) == ids_of(base) <= await content_ids(store)


async def test_a_whole_life_passes_through_a_fault_at_every_request(
    store: OssStore, settings: OssSettings, proxy: FaultProxy, s3: S3Server, tmp_path: Path
) -> None:
    await _life(await _world(store, tmp_path / "measure"), store)
    count = len(proxy.requests)
    faults: list[Fault] = [Status(500), SLOW_DOWN, Reset(carried_out=True), Truncate(0)]
    for number in range(1, count + 1):
        fresh = OssStore(dataclasses.replace(settings, bucket=s3.make_bucket()), QUICK)
        node = await _world(fresh, tmp_path / str(number))
        proxy.heal()
        proxy.fail(faults[number % len(faults)], at=number)
        await _life(node, fresh)
        proxy.heal()


def test_the_proxy_in_a_thread_serves_callers_without_a_loop(s3: S3Server) -> None:
    with proxy_in_thread(s3.host, s3.port, latency_s=0.05) as proxy:
        proxy.fail(Status(503), at=2)
        began = time.monotonic()
        assert httpx.get(f"{proxy.url}/{s3.make_bucket()}").status_code == 200
        assert time.monotonic() - began >= 0.05
        assert httpx.get(proxy.url).status_code == 503
        assert [request.method for request in proxy.requests] == ["GET", "GET"]
