"""Sandboxes that are made of warm clones: nobody can tell, and nothing of one is in the next.

The node is one of its own, which keeps one warm clone per template.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.node import RunningNode, clean, free_port, start_node, stop_server
from e2b import Sandbox

from agentenv.config import load
from tests.vm.conftest import NodeUnderTest, host_leftovers

pytestmark = pytest.mark.vm

CLOCK_SKEW_S_MAX = 0.5
WAIT_S_MAX = 30


class WarmNode:
    """A node that keeps a clone ready, and can be killed and started again over the same state."""

    def __init__(self, accelerator: str) -> None:
        self.state_dir = Path(tempfile.mkdtemp(prefix="aenv-warm-", dir="/var/tmp"))
        self.run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(self.state_dir)}).run_dir
        self._port = free_port()
        self._settings = {"AENV_VIRTUALIZATION_ACCELERATOR": accelerator, "AENV_POOL_WARM_PER_TEMPLATE": "1"}
        self.running = self.start()

    def start(self) -> RunningNode:
        self.running = start_node(self.state_dir, self._port, sys.stderr, **self._settings)
        self.api = httpx.Client(base_url=self.running.api_url, headers={"X-API-KEY": self.running.api_key}, timeout=60)
        return self.running

    def kill_server(self) -> None:
        self.running.process.send_signal(signal.SIGKILL)
        self.running.process.wait(30)
        stop_server(self.running)
        self.api.close()

    def warm(self) -> set[str]:
        """The clones that wait: machines that are no sandbox of anybody."""
        listed = {one["sandboxID"] for one in self.api.get("/v2/sandboxes").raise_for_status().json()}
        states = self.api.get("/aenv/node").raise_for_status().json()["sandboxes"]
        others = self.machines() - listed
        # More than the clones: one that was killed is still ending.
        return others if len(others) == states.get("warm", 0) else set()

    def machines(self) -> set[str]:
        return {path.name for path in (self.run_dir / "vm").iterdir()}

    def wait_warm(self) -> str:
        until = time.monotonic() + WAIT_S_MAX
        while not (found := self.warm()):
            assert time.monotonic() < until, "no warm clone was made"
            time.sleep(0.05)
        return found.pop()

    def create(self, path: str = "/v2/sandboxes", **body: Any) -> dict[str, Any]:
        """Create a sandbox of the warm clone. The first create of a node asks for one."""
        clone = self.wait_warm()
        made = self.api.post(path, json={"templateID": "base", "timeout": 120, **body}).raise_for_status().json()
        assert made["sandboxID"] == clone, "the clone was not used"
        return dict(made)

    def remove(self) -> None:
        self.api.close()
        stop_server(self.running)
        clean(self.state_dir, sys.stderr)
        shutil.rmtree(self.state_dir, ignore_errors=True)
        assert host_leftovers(self.state_dir, self.run_dir) == []


@pytest.fixture(scope="module")
def warm(node: NodeUnderTest) -> Iterator[WarmNode]:
    """The shared node tells which accelerator works here; afterwards the environment is again its own."""
    made = WarmNode(node.running.accelerator)
    try:
        os.environ.update(made.running.environment())
        first = Sandbox.create("base", timeout=60)
        first.kill()
        yield made
    finally:
        os.environ.update(node.running.environment())
        made.remove()


@pytest.fixture(autouse=True)
def _no_sandbox_left(warm: WarmNode) -> Iterator[None]:
    yield
    for listed in warm.api.get("/v2/sandboxes").json():
        warm.api.delete(f"/sandboxes/{listed['sandboxID']}")


def test_consecutive_creates_differ_in_all_that_identifies(warm: WarmNode) -> None:
    seen = []
    for _ in range(3):
        made = warm.create()
        before = time.time()
        box = Sandbox.connect(made["sandboxID"], timeout=60)
        box.files.write("/dev/shm/now", "x")
        modified = box.files.get_info("/dev/shm/now").modified_time.timestamp()
        assert before - CLOCK_SKEW_S_MAX < modified < time.time() + CLOCK_SKEW_S_MAX
        random = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '"
        said = box.commands.run(f"hostname; cat /etc/machine-id; {random}").stdout.split()
        assert box.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == box.sandbox_id
        seen.append((made["sandboxID"], made["envdAccessToken"], *said))
    for part in zip(*seen, strict=True):
        assert len(set(part)) == len(seen), part


def test_nothing_of_one_is_in_the_next(warm: WarmNode) -> None:
    warm.create()
    second = Sandbox.connect(warm.create(envVars={"SECRET": "of the second"})["sandboxID"], timeout=60)
    second.files.write("/home/user/mine", "of the second")
    second.commands.run("exec -a mine sleep 1000", background=True)
    third = Sandbox.connect(warm.create(metadata={"k": "v"})["sandboxID"], timeout=60)
    assert second.commands.run("echo $SECRET").stdout == "of the second\n"
    assert third.commands.run("echo [$SECRET]; env | grep -c SECRET || true").stdout == "[]\n0\n"
    assert not third.files.exists("/home/user/mine")
    assert third.commands.list() == []
    assert third.get_info().metadata == {"k": "v"}
    wrong = {"X-Access-Token": str(second.connection_config.sandbox_headers["X-Access-Token"])}
    refused = _files(warm, third.sandbox_id, wrong)
    assert refused.status_code == 401
    assert _files(warm, third.sandbox_id, {}).status_code == 401


def test_an_unsecured_create_needs_no_token(warm: WarmNode) -> None:
    made = warm.create("/sandboxes", secure=False)
    assert not made.get("envdAccessToken")
    assert _files(warm, made["sandboxID"], {}).status_code == 200
    secured = warm.create("/sandboxes", secure=True)
    assert _files(warm, secured["sandboxID"], {}).status_code == 401
    assert _files(warm, secured["sandboxID"], {"X-Access-Token": secured["envdAccessToken"]}).status_code == 200


def test_options_of_a_create_hold_for_a_clone(warm: WarmNode) -> None:
    made = warm.create(allow_internet_access=False, timeout=7, autoPause=False)
    detail = warm.api.get(f"/sandboxes/{made['sandboxID']}").json()
    assert (detail["allowInternetAccess"], detail["lifecycle"]["onTimeout"]) == (False, "kill")
    box = Sandbox.connect(made["sandboxID"], timeout=7)
    assert box.commands.run("(echo > /dev/tcp/203.0.113.7/80) 2> /dev/null || echo no").stdout == "no\n"
    box.pause()
    box.connect(timeout=60)
    assert box.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == box.sandbox_id
    child = box.fork(timeout=60)[0]
    assert isinstance(child, Sandbox)
    assert child.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == child.sandbox_id


def test_no_clone_outlives_a_killed_server(warm: WarmNode) -> None:
    box = Sandbox.connect(warm.create()["sandboxID"], timeout=60)
    clone = warm.wait_warm()
    warm.kill_server()
    warm.start()
    until = time.monotonic() + WAIT_S_MAX
    while clone in warm.machines():
        assert time.monotonic() < until, "the clone is still there"
        time.sleep(0.05)
    assert not (warm.state_dir / "sandboxes" / clone).exists()
    assert [one["sandboxID"] for one in warm.api.get("/v2/sandboxes").json()] == [box.sandbox_id]
    assert box.commands.run("echo alive").stdout == "alive\n"
    assert warm.api.get(f"/sandboxes/{clone}").status_code == 404
    Sandbox.create("base", timeout=60).kill()
    assert warm.wait_warm() != clone


def _files(warm: WarmNode, sandbox_id: str, headers: dict[str, str]) -> httpx.Response:
    """Ask envd for a file, as an SDK does."""
    routed = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983", **headers}
    url = f"{warm.running.sandbox_url}/files"
    return httpx.get(url, params={"path": "/etc/hostname", "username": "user"}, headers=routed, timeout=30)
