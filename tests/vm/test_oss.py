"""Nodes whose repository is a bucket: layers come from the store when a guest reads them, and outages pass."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.node import RunningNode, clean, free_port, start_node, stop_server
from e2b import CommandHandle, Sandbox
from e2b.connection_config import ApiParams

from agentenv.config import load
from tests.support.fault_proxy import SLOW_DOWN, FaultProxy, proxy_in_thread
from tests.support.s3 import REGION, fast_s3_server
from tests.vm.conftest import host_leftovers

pytestmark = pytest.mark.vm

# Some 120 MB.
READ_ALL = "echo 3 > /proc/sys/vm/drop_caches; cat /usr/lib/x86_64-linux-gnu/*.so* /usr/bin/* | sha256sum"
READ_SOME = "cat /usr/lib/x86_64-linux-gnu/libc*.so* /usr/bin/a* | sha256sum"
# Says that it runs, and some seconds later reads every page of the guest's memory, by the kernel's own mapping of it.
READ_MEMORY = """python3 -u - <<'END'
import os, struct, time
print("ready")
time.sleep(3)
core = os.open("/proc/kcore", os.O_RDONLY)
headers, = struct.unpack_from("<Q", os.pread(core, 64, 0), 32)
count, = struct.unpack_from("<H", os.pread(core, 64, 0), 56)
for number in range(count):
    kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", os.pread(core, 56, headers + 56 * number))
    if kind == 1 and 0xFFFF888000000000 <= address < 0xFFFFC88000000000:
        for at in range(0, size, 1 << 20):
            os.pread(core, 1 << 20, offset + at)
END"""
# The smallest that a configuration may have; the base template's layers are several times as large.
CACHE_BYTES = 64 << 20


@dataclass
class Bucket:
    """A bucket behind a proxy that delays and fails, and the nodes over it."""

    root: Path
    proxy: FaultProxy
    settings: dict[str, str]
    nodes: dict[str, RunningNode]

    def start(self, name: str, *, ensure_base: bool = False, **settings: str) -> RunningNode:
        """A node with a state directory of its own, which may be there already."""
        chosen = {**self.settings, **settings}
        with (self.root / f"{name}.log").open("a") as log:
            node = start_node(self.root / name, free_port(), log, ensure_base=ensure_base, **chosen)
        self.nodes[name] = node
        return node

    def remove(self, name: str) -> None:
        """Stop the node and remove all that it had."""
        stop_server(self.nodes.pop(name))
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(self.root / name)}).run_dir
        clean(self.root / name, sys.stderr)
        shutil.rmtree(self.root / name, ignore_errors=True)
        assert host_leftovers(self.root / name, run_dir) == []


def of(node: RunningNode) -> ApiParams:
    return {"api_url": node.api_url, "sandbox_url": node.sandbox_url, "api_key": node.api_key}


def storage(node: RunningNode) -> dict[str, Any]:
    with httpx.Client(base_url=node.api_url, headers={"X-API-KEY": node.api_key}, timeout=60) as api:
        found: dict[str, Any] = api.get("/aenv/storage").raise_for_status().json()
        return found


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    root = Path(tempfile.mkdtemp(prefix="aenv-oss-", dir="/var/tmp"))
    with (
        pytest.MonkeyPatch.context() as patch,
        fast_s3_server(root) as server,
        proxy_in_thread(server.host, server.port, latency_s=0.02) as proxy,
    ):
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
            patch.delenv(name, raising=False)
        settings = {
            "AENV_SNAPSHOT_BACKEND": "oss",
            "AENV_SNAPSHOT_OSS_BUCKET": server.make_bucket(),
            "AENV_SNAPSHOT_OSS_REGION": REGION,
            "AENV_SNAPSHOT_OSS_ENDPOINT": proxy.url,
            "AENV_POOL_WARM_PER_TEMPLATE": "0",
            "AENV_SANDBOX_PAUSE_LINGER_S": "0",
            "AENV_CACHE_FILL_BYTES_PER_S_MAX": "0",
            "AWS_ACCESS_KEY_ID": server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        }
        made = Bucket(root, proxy, settings, {})
        try:
            made.start("a", ensure_base=True)
            yield made
        finally:
            proxy.heal()
            for name in list(made.nodes):
                made.remove(name)
            shutil.rmtree(root, ignore_errors=True)


def test_an_empty_node_starts_a_template_out_of_the_bucket_and_reads_little_of_it(bucket: Bucket) -> None:
    node = bucket.start("b")
    begun = time.monotonic()
    with Sandbox.create("base", **of(node)) as box:
        assert box.commands.run("echo hello").stdout == "hello\n"
        took_s = time.monotonic() - begun
        report = storage(node)
        fetched, total = report["cache"]["counters"]["bytes_from_store"], report["repository"]["sizeBytes"]
        print(f"cold start {took_s:.2f} s, {fetched >> 20} of {total >> 20} MiB fetched", file=sys.stderr)
        assert 0 < fetched < total // 2
    bucket.remove("b")


def test_the_store_may_be_away_while_a_guest_reads(bucket: Bucket) -> None:
    node = bucket.start("c")
    with Sandbox.create("base", **of(node)) as box:
        bucket.proxy.fail(SLOW_DOWN, times=-1)
        try:
            reading = box.commands.run(READ_SOME, background=True, timeout=240)
            time.sleep(3)
        finally:
            bucket.proxy.heal()
        first = reading.wait().stdout
        assert storage(node)["cache"]["counters"]["stalls"] > 0
        again = box.commands.run(READ_SOME, timeout=240).stdout
        assert first == again
    bucket.remove("c")


def _until_ready(reading: CommandHandle, ready: threading.Event) -> None:
    """Pass the command's output on until it says something; its end is the sandbox's."""
    with suppress(Exception):
        reading.wait(on_stdout=lambda _: ready.set())


def test_a_sandbox_whose_memory_never_comes_ends_with_a_tombstone_that_names_the_store(bucket: Bucket) -> None:
    # Without the fill: else all of the memory may be here before the outage.
    node = bucket.start("f", AENV_CACHE_MEMORY_OUTAGE_S="3", AENV_CACHE_FILL_BYTES_PER_S_MAX="0")
    box = Sandbox.create("base", **of(node))
    # Begun before the outage: a program that has to come from the disk would wait for that one, for longer.
    ready = threading.Event()
    reading = box.commands.run(READ_MEMORY, user="root", timeout=120, background=True)
    threading.Thread(target=_until_ready, args=(reading, ready), daemon=True).start()
    assert ready.wait(60)
    bucket.proxy.fail(SLOW_DOWN, times=-1)
    try:
        with httpx.Client(base_url=node.api_url, headers={"X-API-KEY": node.api_key}, timeout=60) as api:
            until = time.monotonic() + 60
            while (answer := api.get(f"/aenv/tombstones/{box.sandbox_id}")).status_code != 200:
                assert time.monotonic() < until, "it lives on"
                time.sleep(0.2)
        tombstone = answer.json()
    finally:
        bucket.proxy.heal()
    assert tombstone["reason"] == "storage_lost"
    assert "repository" in tombstone["detail"]
    with Sandbox.create("base", **of(node)) as again:
        assert again.commands.run("echo well").stdout == "well\n"
    bucket.remove("f")


def test_a_small_cache_serves_a_guest_that_reads_more_than_it_holds(bucket: Bucket) -> None:
    node = bucket.start("d", AENV_CACHE_SIZE_BYTES_MAX=str(CACHE_BYTES))
    with Sandbox.create("base", **of(node)) as box:
        sums = [box.commands.run(READ_ALL, user="root", timeout=240).stdout for _ in range(2)]
        assert sums[0] == sums[1]
        counters = storage(node)["cache"]["counters"]
        assert counters["evicted_bytes"] > CACHE_BYTES // 2
        assert counters["verify_failures"] == 0
        assert storage(node)["cache"]["sizeBytes"] <= CACHE_BYTES * 1.1
    bucket.remove("d")


def test_a_pause_lives_in_the_bucket_alone(bucket: Bucket) -> None:
    node = bucket.start("e")
    box = Sandbox.create("base", **of(node))
    box.commands.run("head -c 3000000 /dev/urandom > data; sha256sum data > sum")
    box.files.write("/dev/shm/mark", "kept")
    box.pause()
    with httpx.Client(base_url=node.api_url, headers={"X-API-KEY": node.api_key}, timeout=60) as api:
        until = time.monotonic() + 60
        while api.get(f"/aenv/sandboxes/{box.sandbox_id}").json()["pauseSafety"] != "durable":
            assert time.monotonic() < until
            time.sleep(0.1)
    stop_server(bucket.nodes["e"])
    # Everything that is only a copy goes.
    for copy in ("cache", "staging", "blobs"):
        shutil.rmtree(bucket.root / "e" / copy, ignore_errors=True)
    node = bucket.start("e")
    woken = Sandbox.connect(box.sandbox_id, **of(node))
    assert woken.files.read("/dev/shm/mark") == "kept"
    assert woken.commands.run("sha256sum -c sum").stdout == "data: OK\n"
    woken.kill()
    bucket.remove("e")
