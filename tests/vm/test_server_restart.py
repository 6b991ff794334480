"""A server that stops or is killed while sandboxes run: they go on, the next server takes them over.

These tests have a node of their own, since they stop it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.node import NodeFailed, RunningNode, aenv, clean, free_port, start_node, stop_server
from e2b import Sandbox

from agentenv.config import load
from tests.vm.conftest import host_leftovers

pytestmark = pytest.mark.vm


class Restartable:
    """A node whose server can be ended in different ways and started again over the same state."""

    def __init__(self) -> None:
        self.state_dir = Path(tempfile.mkdtemp(prefix="aenv-restart-", dir="/var/tmp"))
        self.port = free_port()
        self.running = self.start()

    def start(self) -> RunningNode:
        self.running = start_node(self.state_dir, self.port, sys.stderr)
        os.environ.update(self.running.environment())
        return self.running

    def kill_server(self, number: int = signal.SIGKILL) -> None:
        self.running.process.send_signal(number)
        self.running.process.wait(30)
        stop_server(self.running)

    def remove(self) -> None:
        stop_server(self.running)
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(self.state_dir)}).run_dir
        clean(self.state_dir, sys.stderr)
        shutil.rmtree(self.state_dir, ignore_errors=True)
        assert host_leftovers(self.state_dir, run_dir) == []


@pytest.fixture(scope="module")
def node() -> Iterator[Restartable]:
    # The SDK finds its node by the environment, which belongs to the session's node again afterwards.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
            patch.setenv(name, "")
        made = Restartable()
        yield made
        made.remove()


@pytest.fixture
def sandbox(node: Restartable) -> Iterator[Sandbox]:
    box = Sandbox.create("base", timeout=600)
    yield box
    box.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stream_to_a_guest_survives_a_restart_of_the_server(node: Restartable, sandbox: Sandbox, number: int) -> None:
    lines: list[str] = []
    command = sandbox.commands.run("for i in $(seq 60); do echo $i; sleep 0.1; done", background=True)
    reader = threading.Thread(target=lambda: command.wait(on_stdout=lines.append))
    reader.start()
    time.sleep(0.5)
    node.kill_server(number)
    assert sandbox.commands.run("echo while the server is away").stdout == "while the server is away\n"
    node.start()
    reader.join(60)
    assert "".join(lines).split() == [str(i) for i in range(1, 61)]
    assert sandbox.get_info().state.value == "running"
    sandbox.pause()
    sandbox.connect(timeout=600)


@pytest.mark.parametrize("moment", ["composing", "serving"])
def test_a_start_that_fails_leaves_the_sandboxes_with_their_daemons(
    node: Restartable, sandbox: Sandbox, moment: str, tmp_path: Path
) -> None:
    run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(node.state_dir)}).run_dir
    sandbox.files.write("/home/user/kept", "yes")
    keeper = (run_dir / "keeper.json").read_bytes()
    node.kill_server(signal.SIGTERM)
    obstacle = run_dir / "api.sock"
    settings = {"AENV_IMAGES_AUTH_FILE": str(tmp_path / "nowhere")} if moment == "composing" else {}
    if moment == "serving":
        obstacle.mkdir()
    try:
        with pytest.raises(NodeFailed):
            start_node(node.state_dir, node.port, sys.stderr, **settings)
        assert sandbox.commands.run("echo it goes on; sync").stdout == "it goes on\n"
    finally:
        if moment == "serving":
            obstacle.rmdir()
        node.start()
    assert (run_dir / "keeper.json").read_bytes() == keeper
    sandbox.pause()
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/kept") == "yes"


def test_a_server_killed_in_the_middle_of_work_leaves_everything_usable(node: Restartable, sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/kept", "yes")
    for path in ("pause", "snapshots", "fork"):
        request = threading.Thread(target=_post, args=(node.running, sandbox.sandbox_id, path))
        request.start()
        time.sleep(0.02)
        node.kill_server()
        request.join()
        node.start()
        sandbox.connect(timeout=600)
        assert sandbox.files.read("/home/user/kept") == "yes"
    with httpx.Client(base_url=node.running.api_url, headers={"X-API-KEY": node.running.api_key}) as api:
        for listed in api.get("/v2/sandboxes").json():
            if listed["sandboxID"] != sandbox.sandbox_id:
                api.delete(f"/sandboxes/{listed['sandboxID']}")


def test_a_paused_sandbox_survives_the_death_of_everything(node: Restartable, sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/kept", "yes")
    sandbox.pause()
    run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(node.state_dir)}).run_dir
    until = time.monotonic() + 60
    while (run_dir / "vm" / sandbox.sandbox_id).exists():
        assert time.monotonic() < until, "the pause did not become durable"
        time.sleep(0.1)
    node.kill_server()
    for name in ("proxy", "keeper", "blockd"):
        pid = int(json.loads((run_dir / f"{name}.json").read_bytes())["pid"])
        os.kill(pid, signal.SIGKILL)
    node.start()
    sandbox.connect(timeout=600)
    assert sandbox.files.read("/home/user/kept") == "yes"


def test_a_second_server_on_the_same_state_is_refused(node: Restartable) -> None:
    command = [*aenv(), "server", "--listen", f"127.0.0.1:{free_port()}", "--state", str(node.state_dir)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode != 0
    assert str(node.state_dir) in second.stderr


def _post(running: RunningNode, sandbox_id: str, path: str) -> None:
    try:
        headers = {"X-API-KEY": running.api_key}
        httpx.post(f"{running.api_url}/sandboxes/{sandbox_id}/{path}", json={}, headers=headers, timeout=30)
    except httpx.TransportError:
        return
