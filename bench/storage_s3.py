"""Starts from an S3 repository with latency: cold, with the recorded prefetch, and warm beside a local repository.

Owns the S3 server (the one that the tests use, behind the proxy that adds latency) and the nodes. The bucket is filled
by one node; each cold or prefetched start is the first one of another node with an empty cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2b import Sandbox
from tests.support.fault_proxy import FaultProxy, proxy_in_thread
from tests.support.s3 import REGION, S3Server, fast_s3_server

from agentenv.block import BlockClient, CacheState
from agentenv.config import load
from agentenv.snapshots.stores.credentials import Credentials
from agentenv.snapshots.stores.oss import OssSettings, OssStore
from bench.node import RunningNode, temporary_node

Samples = dict[str, list[float]]
MS: Final = 1000.0
LATENCY_S: Final = 0.02
CACHE_BYTES: Final = 8 << 30
NODES: Final = 3
STARTS: Final = 15
FIRST_STARTS: Final = 2
RECORDED_S_MAX: Final = 120.0
FILLED_S_MAX: Final = 120.0
RESERVE: Final = {"AENV_SANDBOX_MEMORY_RESERVE_MIB": "512"}
# Where starts are compared, each is to read its template: a clone that was held for it would hide the storage.
UNHELD: Final = {"AENV_POOL_WARM_PER_TEMPLATE": "0"}


@dataclass(frozen=True)
class Bucket:
    """A bucket behind the latency, and the settings of a node that uses it."""

    server: S3Server
    proxy: FaultProxy
    name: str

    def settings(self) -> dict[str, str]:
        return RESERVE | {
            "AENV_SNAPSHOT_BACKEND": "oss",
            "AENV_SNAPSHOT_OSS_BUCKET": self.name,
            "AENV_SNAPSHOT_OSS_REGION": REGION,
            "AENV_SNAPSHOT_OSS_ENDPOINT": self.proxy.url,
            "AENV_SNAPSHOT_OSS_ADDRESSING": "path",
            "AENV_CACHE_SIZE_BYTES_MAX": str(CACHE_BYTES),
            "AWS_ACCESS_KEY_ID": self.server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_access_key,
        }

    def keys(self, folder: str) -> list[str]:
        """Object keys below a folder, asked past the latency."""

        async def ask() -> list[str]:
            return [entry.key for entry in await self._store().list(folder)]

        return asyncio.run(ask())

    def forget(self, folder: str) -> None:
        """Delete all objects below a folder."""

        async def delete() -> None:
            store = self._store()
            for entry in await store.list(folder):
                await store.delete(entry.key)

        asyncio.run(delete())

    def _store(self) -> OssStore:
        credentials = Credentials(self.server.access_key_id, self.server.secret_access_key)
        return OssStore(
            OssSettings(
                bucket=self.name,
                region=REGION,
                endpoint=self.server.endpoint,
                addressing="path",
                allow_http=True,
                credentials=credentials,
            )
        )


def s3() -> Samples:
    """All measures of starts from S3; takes minutes."""
    samples: Samples = {}
    with _bucket() as bucket:
        with temporary_node("s3-fill", **bucket.settings()) as node, _environment(node):
            Sandbox.create("base", timeout=600).kill()
        bucket.forget("traces/")
        for _ in range(NODES):
            for name, values in _cold(bucket).items():
                samples.setdefault(name, []).extend(values)
        for _ in range(NODES):
            with _used_node(bucket) as (_, first_ms):
                samples.setdefault("s3_prefetched_start", []).append(first_ms)
        samples |= _warm(bucket)
    return samples


def _warm(bucket: Bucket) -> Samples:
    """Starts of a node that has all of the template in its cache, and of one with a local repository, in turns."""
    local_node = temporary_node("s3-local", **RESERVE, **UNHELD)
    with _used_node(bucket, **UNHELD) as (node, _), local_node as local:
        _wait_for_fill(node)
        warm, plain = [], []
        for number in range(FIRST_STARTS + STARTS):
            pair = {}
            for one in (node, local) if number % 2 else (local, node):
                with _environment(one):
                    pair[one.api_url] = _start_ms()
            warm.append(pair[node.api_url])
            plain.append(pair[local.api_url])
    warm, plain = warm[FIRST_STARTS:], plain[FIRST_STARTS:]
    ratios = [one / other for one, other in zip(warm, plain, strict=True)]
    return {"s3_warm_start": warm, "local_start": plain, "s3_warm_ratio": ratios}


def _cold(bucket: Bucket) -> Samples:
    """The first start of a node that has nothing, and no trace to fetch by."""
    bucket.forget("traces/")
    with _used_node(bucket) as (node, first_ms):
        state = _cache(node)
        # Asked right after the answer; what the background fills meanwhile counts too.
        image_bytes = sum(blob.size_bytes for blob in state.blobs)
        share = state.bytes_from_store / image_bytes if image_bytes else float("nan")
        _wait_for_trace(bucket)
    return {"s3_cold_start": [first_ms], "s3_bytes_share": [share]}


@contextlib.contextmanager
def _used_node(bucket: Bucket, **settings: str) -> Iterator[tuple[RunningNode, float]]:
    """A new node with an empty cache, and how long its first sandbox took to answer, in milliseconds."""
    with temporary_node("s3", **bucket.settings(), **settings) as node, _environment(node):
        started = time.perf_counter()
        box = Sandbox.create("base", timeout=600)
        first_ms = (time.perf_counter() - started) * MS
        try:
            yield node, first_ms
        finally:
            box.kill()


def _start_ms() -> float:
    """Milliseconds of a start until the answer; the sandbox is gone afterwards, and the node idle."""
    started = time.perf_counter()
    box = Sandbox.create("base", timeout=600)
    answered_ms = (time.perf_counter() - started) * MS
    box.kill()
    time.sleep(0.25)
    return answered_ms


def _wait_for_fill(node: RunningNode) -> None:
    """Until the node's cache has all of every blob in use."""

    def is_full() -> bool:
        return all(not blob.in_use or blob.cached_bytes >= blob.size_bytes for blob in _cache(node).blobs)

    _wait_until(is_full, FILLED_S_MAX, "the cache is not filled")


def _cache(node: RunningNode) -> CacheState:
    run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(node.state_dir)}).run_dir

    async def ask() -> CacheState:
        client = BlockClient(run_dir / "blockd.sock")
        try:
            return await client.cache()
        finally:
            await client.close()

    return asyncio.run(ask())


def _wait_for_trace(bucket: Bucket) -> None:
    """Until the order of the first start is in the repository."""
    _wait_until(lambda: bool(bucket.keys("traces/")), RECORDED_S_MAX, "there is no trace of a first start")


def _wait_until(is_so: Callable[[], bool], seconds_max: float, otherwise: str) -> None:
    until = time.monotonic() + seconds_max
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"{otherwise} within {seconds_max:g} s")
        time.sleep(0.5)


@contextlib.contextmanager
def _bucket() -> Iterator[Bucket]:
    with tempfile.TemporaryDirectory(prefix="aenv-s3-") as folder, fast_s3_server(Path(folder)) as server:
        name = server.make_bucket()
        with proxy_in_thread(server.host, server.port, latency_s=LATENCY_S) as proxy:
            yield Bucket(server, proxy, name)


@contextlib.contextmanager
def _environment(node: RunningNode) -> Iterator[None]:
    """The SDK's environment of a node, given back afterwards."""
    wanted = node.environment()
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
