"""The three stores, each empty, behind one fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.s3 import REGION, S3Server, s3_server

from agentenv.snapshots.stores import MemoryStore, PosixStore, Store
from agentenv.snapshots.stores.credentials import Credentials
from agentenv.snapshots.stores.oss import OssSettings, OssStore


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests; each uses a bucket of its own."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


def oss_settings(server: S3Server, prefix: str = "") -> OssSettings:
    """A new bucket on the server."""
    return OssSettings(
        bucket=server.make_bucket(),
        region=REGION,
        endpoint=server.endpoint,
        addressing="path",
        prefix=prefix,
        allow_http=True,
        credentials=Credentials(server.access_key_id, server.secret_access_key),
    )


@pytest.fixture(params=["memory", "posix", "oss", "oss-prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store."""
    if request.param == "memory":
        return MemoryStore()
    if request.param == "posix":
        return PosixStore(tmp_path / "repository")
    server: S3Server = request.getfixturevalue("s3")
    return OssStore(oss_settings(server, "nodes/a" if request.param == "oss-prefix" else ""))
