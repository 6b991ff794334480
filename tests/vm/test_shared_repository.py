"""Two nodes over one repository directory: what one commits starts on the other, and neither spoils the other's."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from bench.node import RunningNode, clean, free_port, start_node, stop_server
from e2b import Sandbox
from e2b.connection_config import ApiParams

from agentenv.config import load
from tests.vm.conftest import host_leftovers

pytestmark = pytest.mark.vm


@dataclass(frozen=True)
class Pair:
    """Node `a` builds the base template; `b` has an empty state directory and finds everything in the repository."""

    a: RunningNode
    b: RunningNode
    repository: Path

    @staticmethod
    def of(node: RunningNode) -> ApiParams:
        return {"api_url": node.api_url, "sandbox_url": node.sandbox_url, "api_key": node.api_key}


def api(node: RunningNode) -> httpx.Client:
    return httpx.Client(base_url=node.api_url, headers={"X-API-KEY": node.api_key}, timeout=120)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    root = Path(tempfile.mkdtemp(prefix="aenv-pair-", dir="/var/tmp"))
    settings = {
        "AENV_SNAPSHOT_POSIX_FS_PATH": str(root / "repository"),
        "AENV_POOL_WARM_PER_TEMPLATE": "0",
        "AENV_SANDBOX_PAUSE_LINGER_S": "0",
        "AENV_SNAPSHOT_REFRESH_S": "3600",
    }
    nodes: list[RunningNode] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
            patch.delenv(name, raising=False)
        try:
            # Only the first makes the template.
            nodes.append(start_node(root / "a", free_port(), sys.stderr, **settings))
            nodes.append(start_node(root / "b", free_port(), sys.stderr, ensure_base=False, **settings))
            yield Pair(nodes[0], nodes[1], root / "repository")
        finally:
            for node in nodes:
                stop_server(node)
            for name in ("a", "b"):
                run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(root / name)}).run_dir
                if (root / name).exists():
                    clean(root / name, sys.stderr)
                shutil.rmtree(root / name, ignore_errors=True)
                assert host_leftovers(root / name, run_dir) == []
            shutil.rmtree(root, ignore_errors=True)


def test_a_snapshot_of_one_node_starts_on_the_other(pair: Pair) -> None:
    with Sandbox.create("base", **pair.of(pair.a)) as source:
        source.commands.run("head -c 5000000 /dev/urandom > data; sha256sum data > sum; (sleep 1000; echo) &")
        source.files.write("/dev/shm/in-memory", "still here")
        snapshot = source.create_snapshot()
    with Sandbox.create(snapshot.snapshot_id, **pair.of(pair.b)) as copy:
        assert copy.commands.run("sha256sum -c sum").stdout == "data: OK\n"
        assert copy.files.read("/dev/shm/in-memory") == "still here"
        assert copy.commands.run("pgrep -c sleep").stdout.strip() == "1"


def test_a_deleted_snapshot_stays_whole_for_the_other_nodes_sandboxes(pair: Pair) -> None:
    with Sandbox.create("base", **pair.of(pair.a)) as source:
        source.commands.run("head -c 30000000 /dev/urandom > data; sha256sum data > sum; sync")
        snapshot = source.create_snapshot()
    with Sandbox.create(snapshot.snapshot_id, **pair.of(pair.b)) as user:
        with api(pair.a) as a:
            assert Sandbox.delete_snapshot(snapshot.snapshot_id, **pair.of(pair.a))
            a.post("/aenv/storage/gc", json={"graceS": 0}).raise_for_status()
        # Not from the guest's memory: what it reads now must still be in the repository.
        user.commands.run("echo 3 > /proc/sys/vm/drop_caches", user="root")
        assert user.commands.run("sha256sum -c sum").stdout == "data: OK\n"
        before = _size(pair.repository)
    until = time.monotonic() + 20
    with api(pair.b) as b:
        # Its VMM may still be ending.
        while _size(pair.repository) > before - 25_000_000:
            assert time.monotonic() < until, "the blobs of the deleted snapshot stay"
            b.post("/aenv/storage/gc", json={"graceS": 0}).raise_for_status()


def test_one_nodes_restart_leaves_the_others_pauses_alone(pair: Pair) -> None:
    with Sandbox.create("base", **pair.of(pair.b)) as sleeper:
        sleeper.files.write("mark", "b's")
        sleeper.pause()
        settings = {name: value for name, value in os.environ.items() if name.startswith("AENV_")}
        stop_server(pair.a)
        port = int(pair.a.api_url.rsplit(":", 1)[1])
        again = start_node(
            pair.a.state_dir,
            port,
            sys.stderr,
            ensure_base=False,
            **settings,
            AENV_SNAPSHOT_POSIX_FS_PATH=str(pair.repository),
        )
        try:
            with api(again) as a:
                a.post("/aenv/storage/gc", json={"graceS": 0}).raise_for_status()
            woken = Sandbox.connect(sleeper.sandbox_id, **pair.of(pair.b))
            assert woken.files.read("mark") == "b's"
        finally:
            stop_server(again)


def _size(root: Path) -> int:
    """Bytes on disk; two names of one file count once."""
    blocks = {(s.st_dev, s.st_ino): s.st_blocks for s in (p.stat() for p in root.rglob("*")) if s.st_size}
    return sum(blocks.values()) * 512
