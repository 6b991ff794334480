"""What a server finds of its repository when it starts: told within seconds, by the name of the setting."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conformance.snapshots.conftest import oss_settings
from tests.support.fault_proxy import FaultProxy, Status
from tests.support.s3 import S3Server
from tests.unit.snapshots.repository_world import FakeDigester

from agentenv.errors import ConfigError, StoreUnavailable
from agentenv.server.repositories import Opened, check_configured
from agentenv.snapshots import MemoryStore, PosixStore, Process, Store
from agentenv.snapshots.opening import RepositoryOptions, open_repository
from agentenv.snapshots.stores.oss import OssSettings, OssStore, Patience

KEY = "0123456789abcdef" * 4
SECONDS_MAX = 10.0


def opened(store: Store, tmp_path: Path, key: str | None = None) -> Opened:
    location = store.settings.location if isinstance(store, OssStore) else "here"
    options = RepositoryOptions(tmp_path, Path("/nowhere"), location, encryption_key=key)
    return Opened(store, open_repository(store, options, Process("node-a"), FakeDigester()), 0.0, options)


@contextmanager
def soon() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < SECONDS_MAX


async def test_a_bucket_that_does_its_part_is_taken(s3: S3Server, tmp_path: Path) -> None:
    store = OssStore(oss_settings(s3, "nodes/a"))
    with soon():
        await check_configured(opened(store, tmp_path))
    assert await store.list("gc/") == []


@pytest.mark.parametrize(("status", "named"), [(403, r"snapshot\.oss.*access is denied.*credentials_file"), (404, "")])
async def test_wrong_keys_are_named(s3: S3Server, tmp_path: Path, status: int, named: str) -> None:
    async with FaultProxy(s3.host, s3.port) as proxy:
        proxy.fail(Status(status), times=-1)
        settings = dataclasses.replace(oss_settings(s3), endpoint=proxy.url)
        with soon(), pytest.raises(ConfigError, match=named or r"snapshot\.oss\.bucket"):
            await check_configured(opened(OssStore(settings), tmp_path))


async def test_a_wrong_bucket_is_named(s3: S3Server, tmp_path: Path) -> None:
    settings = dataclasses.replace(oss_settings(s3), bucket="nowhere")
    with soon(), pytest.raises(ConfigError, match=r"snapshot\.oss\.bucket: s3://nowhere"):
        await check_configured(opened(OssStore(settings), tmp_path))


async def test_a_store_that_ignores_conditions_is_named(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = OssStore.put

    async def careless(store: OssStore, key: str, content: bytes, **_conditions: object) -> str:
        return await put(store, key, content)

    monkeypatch.setattr(OssStore, "put", careless)
    with soon(), pytest.raises(ConfigError, match=r"snapshot\.oss\.endpoint: .*If-None-Match"):
        await check_configured(opened(OssStore(oss_settings(s3)), tmp_path))


async def test_a_store_that_does_not_answer_ends_the_start(tmp_path: Path) -> None:
    settings = OssSettings(bucket="b", region="r", endpoint="http://127.0.0.1:1", addressing="path", allow_http=True)
    patience = Patience(request_s_max=0.5, operation_s_max=1.0)
    with soon(), pytest.raises(StoreUnavailable, match=r"snapshot\.oss\.endpoint"):
        await check_configured(opened(OssStore(settings), tmp_path), patience)


async def test_all_nodes_have_one_key_in_a_bucket_and_a_directory(s3: S3Server, tmp_path: Path) -> None:
    for store in (MemoryStore(), PosixStore(tmp_path / "repository"), OssStore(oss_settings(s3, "nodes/a"))):
        await check_configured(opened(store, tmp_path, KEY))
        await check_configured(opened(store, tmp_path, KEY))
        for key in (KEY[::-1], None):
            with pytest.raises(ConfigError, match=r"snapshot\.encryption_key_file"):
                await check_configured(opened(store, tmp_path, key))
