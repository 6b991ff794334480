"""A node whose disk is full: what must be stored is refused with 507, and every sandbox goes on.

The node has a state directory of its own on a small tmpfs, and a template of one static binary, which fits there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
from bench.node import RunningNode, aenv, clean, free_port, start_node, stop_server

from agentenv.config import load
from agentenv.templates.rootfs import build_scratch_rootfs
from tests.vm.conftest import NodeUnderTest, host_leftovers

pytestmark = pytest.mark.vm

SIZE_MIB: Final = 320
GUEST_DISK_MIB: Final = 512
BUSYBOX: Final = "/bin/busybox"
NAME: Final = "small"
# The guest's clockwork and its heap: in memory, since its disk is what fails.
TICK: Final = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/tick; /bin/busybox sleep 0.1; done"


class SmallNode:
    """A node in a tmpfs that tests can fill."""

    def __init__(self, running: RunningNode, mount: Path) -> None:
        self.running = running
        self.mount = mount
        headers = {"X-API-KEY": running.api_key}
        self.api = httpx.Client(base_url=running.api_url, headers=headers, timeout=120)

    def create(self) -> str:
        made = self.api.post("/v2/sandboxes", json={"templateID": NAME, "timeout": 600})
        assert made.status_code == 201, made.text
        return str(made.json()["sandboxID"])

    def exec(self, sandbox_id: str, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [*aenv(), "exec", *options, sandbox_id, "--", BUSYBOX, "sh", "-c", script]
        environment = {**os.environ, **self.running.environment()}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def said(self, sandbox_id: str, script: str) -> str:
        done = self.exec(sandbox_id, script)
        assert done.returncode == 0, done
        return done.stdout

    def assert_ticks(self, sandbox_id: str) -> None:
        """The loop in this guest goes on."""
        read = 'until n=$(/bin/busybox cat /dev/shm/tick) && [ -n "$n" ]; do :; done; echo $n'
        before = int(self.said(sandbox_id, read))
        time.sleep(0.5)
        assert int(self.said(sandbox_id, read)) > before

    @contextmanager
    def full(self, left_mib: int = 0) -> Iterator[None]:
        """The disk is full but for `left_mib`, until the context ends."""
        ballast = self.mount / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                block = b"\xff" * (1 << 20)
                while len(block):
                    if shutil.disk_usage(self.mount).free <= left_mib << 20:
                        break
                    try:
                        file.write(block)
                    except OSError as error:
                        assert error.errno == errno.ENOSPC
                        block = block[: len(block) // 2]
            yield
        finally:
            ballast.unlink()

    def state(self, sandbox_id: str) -> tuple[str, str | None]:
        found = self.api.get(f"/aenv/sandboxes/{sandbox_id}").raise_for_status().json()
        return found["state"], found["pauseSafety"]


@pytest.fixture(scope="module")
def small(node: NodeUnderTest) -> Iterator[SmallNode]:
    """The shared node is asked only which accelerator works here: finding out takes ten seconds."""
    if not Path(BUSYBOX).exists():
        pytest.skip("no busybox on this machine (Debian: busybox-static)")
    mount = Path(tempfile.mkdtemp(prefix="aenv-full-", dir="/var/tmp"))
    state_dir = mount / "state"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "aenv-test", str(mount)], check=True)
    try:
        settings = {
            "AENV_VIRTUALIZATION_ACCELERATOR": node.running.accelerator,
            "AENV_POOL_WARM_PER_TEMPLATE": "0",
            "AENV_NETWORK_SLOT_POOL_IDLE_MIN": "2",
        }
        running = start_node(state_dir, free_port(), sys.stderr, ensure_base=False, **settings)
        try:
            made = SmallNode(running, mount)
            _build(made)
            yield made
            made.api.close()
        finally:
            stop_server(running)
    finally:
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(state_dir)}).run_dir
        clean(state_dir, sys.stderr)
        left = host_leftovers(state_dir, run_dir)
        subprocess.run(["umount", str(mount)], check=True)
        mount.rmdir()
    assert left == []


@pytest.fixture
def ticking(small: SmallNode) -> Iterator[str]:
    """A sandbox with a loop that counts, and 20 MiB of memory that a capture has to store."""
    sandbox_id = small.create()
    assert small.exec(sandbox_id, TICK, "--detach").returncode == 0
    small.said(sandbox_id, "/bin/busybox dd if=/dev/urandom of=/dev/shm/heap bs=1M count=20 2> /dev/null")
    yield sandbox_id
    small.api.delete(f"/sandboxes/{sandbox_id}")


def test_a_pause_without_room_is_507_and_the_sandbox_goes_on(small: SmallNode, ticking: str) -> None:
    digest = small.said(ticking, "/bin/busybox sha256sum /dev/shm/heap")
    for left_mib in (0, 4):
        with small.full(left_mib):
            refused = small.api.post(f"/sandboxes/{ticking}/pause", json={})
            _assert_no_room(refused)
            assert small.state(ticking) == ("running", None)
            small.assert_ticks(ticking)
    assert small.api.post(f"/sandboxes/{ticking}/pause", json={}).status_code == 204
    until = time.monotonic() + 60
    while small.state(ticking) != ("paused", "durable"):
        assert time.monotonic() < until, small.state(ticking)
        time.sleep(0.1)
    assert small.api.post(f"/v2/sandboxes/{ticking}/connect", json={"timeout": 600}).status_code == 201
    small.assert_ticks(ticking)
    assert small.said(ticking, "/bin/busybox sha256sum /dev/shm/heap") == digest


def test_a_snapshot_without_room_is_507_and_its_source_goes_on(small: SmallNode, ticking: str) -> None:
    with small.full():
        _assert_no_room(small.api.post(f"/sandboxes/{ticking}/snapshots", json={}))
        small.assert_ticks(ticking)
    made = small.api.post(f"/sandboxes/{ticking}/snapshots", json={})
    assert made.status_code == 201, made.text
    small.assert_ticks(ticking)
    assert small.api.delete(f"/templates/{made.json()['snapshotID']}").status_code == 204


def test_a_fork_without_room_is_an_error_and_its_source_goes_on(small: SmallNode, ticking: str) -> None:
    with small.full():
        _assert_no_room(small.api.post(f"/sandboxes/{ticking}/fork", json={"count": 2}))
        small.assert_ticks(ticking)
    assert [one["sandboxID"] for one in small.api.get("/v2/sandboxes").json()] == [ticking]
    made = small.api.post(f"/sandboxes/{ticking}/fork", json={"count": 1})
    assert made.status_code == 201, made.text
    child = made.json()[0]["sandbox"]["sandboxID"]
    small.assert_ticks(child)
    small.api.delete(f"/sandboxes/{child}")


def test_a_create_without_room_is_507_and_leaves_nothing(small: SmallNode) -> None:
    with small.full():
        _assert_no_room(small.api.post("/v2/sandboxes", json={"templateID": NAME}))
        assert small.api.get("/v2/sandboxes").json() == []
    small.api.delete(f"/sandboxes/{small.create()}")


def test_guests_that_write_wait_until_there_is_room_and_lose_nothing(small: SmallNode, ticking: str) -> None:
    """An I/O error would end their file systems for good; the one that only has a journal to write is no better off."""
    greedy = small.create()
    with small.full(left_mib=16):
        fill = f"{BUSYBOX} dd if=/dev/urandom of=/big bs=1M count=64 2> /dev/null; {BUSYBOX} sha256sum /big > /sum"
        assert small.exec(greedy, f"{fill}; {BUSYBOX} sync; echo > /dev/shm/done", "--detach").returncode == 0
        assert small.exec(ticking, "echo written > /file; /bin/busybox sync", "--detach").returncode == 0
        # Longer than a journal's commit interval (5 s), which is when the errors would come.
        time.sleep(8)
        assert small.state(greedy)[0] == "running"
        small.assert_ticks(ticking)
    until = time.monotonic() + 60
    while small.exec(greedy, f"{BUSYBOX} test -e /dev/shm/done").returncode != 0:
        assert time.monotonic() < until, "the greedy guest does not go on although there is room"
        time.sleep(0.2)
    assert small.exec(greedy, f"{BUSYBOX} sha256sum -c /sum").returncode == 0
    assert small.said(ticking, f"{BUSYBOX} sync; {BUSYBOX} cat /file") == "written\n"
    assert small.api.delete(f"/sandboxes/{greedy}").status_code == 204


def test_kill_does_not_wait_for_room(small: SmallNode) -> None:
    greedy = small.create()
    with small.full(left_mib=8):
        write = f"{BUSYBOX} dd if=/dev/urandom of=/big bs=1M count=64 conv=fsync"
        assert small.exec(greedy, write, "--detach").returncode == 0
        time.sleep(3)
        assert small.api.delete(f"/sandboxes/{greedy}").status_code == 204
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(small.mount / "state")}).run_dir
        until = time.monotonic() + 20
        while (run_dir / "vm" / greedy).exists():
            assert time.monotonic() < until, "the killed sandbox's process does not go"
            time.sleep(0.1)


def _assert_no_room(refused: httpx.Response) -> None:
    assert refused.status_code == 507, refused.text
    assert refused.json()["code"] == 507
    assert any(word in refused.json()["message"] for word in ("full", "room", "space")), refused.text


def _build(node: SmallNode) -> None:
    work = Path(tempfile.mkdtemp(prefix="aenv-image-", dir="/var/tmp"))
    try:
        image = asyncio.run(build_scratch_rootfs(work, GUEST_DISK_MIB, {BUSYBOX: Path(BUSYBOX)}))
        body = {"name": NAME, "image": str(image), "memoryMB": 128}
        made = node.api.post("/aenv/templates", json=body)
        assert made.status_code == 201, made.text
    finally:
        shutil.rmtree(work)
