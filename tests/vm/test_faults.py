"""Faults as a user or an operator meets them: bad input, clients that go away, and the death of every process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ({"templateID": "no-such-template"}, 404, "no-such-template"),
        ({"templateID": "base", "timeout": -1}, 400, "timeout"),
        ({"templateID": "base", "timeout": 10**12}, 400, "timeout"),
        ({"templateID": 7}, 400, "templateID"),
        ({}, 400, "templateID"),
        ({"templateID": "base", "mcp": {"x": {}}}, 400, "mcp"),
    ],
)
def test_a_bad_create_is_refused_by_name(node: NodeUnderTest, body: object, status: int, names: str) -> None:
    answer = node.api.post("/v2/sandboxes", json=body)
    assert answer.status_code == status
    assert answer.json()["code"] == status
    assert names in answer.json()["message"]
    assert node.api.get("/v2/sandboxes").json() == []


def test_malformed_json_a_wrong_key_and_an_unknown_path(node: NodeUnderTest) -> None:
    malformed = node.api.post("/v2/sandboxes", content=b'{"templateID": ', headers={"Content-Type": "application/json"})
    assert (malformed.status_code, malformed.json()["code"]) == (400, 400)
    wrong = httpx.get(f"{node.running.api_url}/v2/sandboxes", headers={"X-API-KEY": "e2b_" + "0" * 40})
    assert (wrong.status_code, wrong.json()["code"]) == (401, 401)
    assert node.api.get("/no/such/path").json()["code"] == 404


def test_unknown_ids_and_closed_ports_have_the_contracts_bodies(node: NodeUnderTest, sandbox: Sandbox) -> None:
    unknown = _through_proxy(node, "i" + "0" * 20, 80)
    assert unknown.status_code == 502
    assert unknown.json() == {"sandboxId": "i" + "0" * 20, "message": "The sandbox was not found", "code": 502}
    closed = _through_proxy(node, sandbox.sandbox_id, 4321)
    assert closed.status_code == 502
    assert closed.json()["message"] == "The sandbox is running but port is not open"
    assert _through_proxy(node, sandbox.sandbox_id, 49983, "/init").status_code == 404
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/fork"), ("POST", "/snapshots")):
        answer = node.api.request(method, f"/sandboxes/i{'0' * 20}{path}", json={} if method == "POST" else None)
        assert (answer.status_code, answer.json()["code"]) == (404, 404)


def test_a_template_larger_than_the_node_is_refused(node: NodeUnderTest) -> None:
    answer = node.api.post("/aenv/templates", json={"name": "huge", "memoryMB": 1 << 20})
    assert answer.status_code == 400
    assert "MiB" in answer.json()["message"]


def test_a_client_that_goes_away_in_the_middle_of_create_leaves_nothing(node: NodeUnderTest) -> None:
    host, port = node.running.api_url.removeprefix("http://").split(":")
    body = b'{"templateID": "base", "timeout": 60}'
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: {host}\r\nX-API-KEY: {node.running.api_key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        time.sleep(0.02)
    node.wait("no sandbox left", lambda: node.api.get("/v2/sandboxes").json() == [])


def test_kill_during_pause_and_two_pauses_at_once(node: NodeUnderTest) -> None:
    for _ in range(3):
        box = Sandbox.create("base", timeout=60)
        statuses: list[int] = []

        def pause(sandbox_id: str = box.sandbox_id, seen: list[int] = statuses) -> None:
            with httpx.Client(base_url=node.running.api_url, headers={"X-API-KEY": node.running.api_key}) as api:
                seen.append(api.post(f"/sandboxes/{sandbox_id}/pause", json={}, timeout=30).status_code)

        threads = [threading.Thread(target=pause) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        assert node.api.delete(f"/sandboxes/{box.sandbox_id}").status_code == 204
        for thread in threads:
            thread.join()
        assert set(statuses) <= {204, 404, 409}
        assert node.api.get(f"/sandboxes/{box.sandbox_id}").status_code == 404


def test_a_vmm_killed_with_9_leaves_a_tombstone_and_the_contracts_502(node: NodeUnderTest) -> None:
    box = Sandbox.create("base", timeout=60)
    os.kill(node.vmm_pid(box.sandbox_id), signal.SIGKILL)
    node.wait("its end", lambda: node.api.get(f"/sandboxes/{box.sandbox_id}").status_code == 404)
    assert node.tombstone(box.sandbox_id)["reason"] == "vmm_died"
    assert _through_proxy(node, box.sandbox_id, 49983, "/health").json()["message"] == "The sandbox was not found"
    with pytest.raises(SandboxException):
        box.commands.run("true")


def test_a_guest_that_powers_off_ends(node: NodeUnderTest) -> None:
    box = Sandbox.create("base", timeout=60)
    box.commands.run("echo o > /proc/sysrq-trigger", user="root", background=True)
    node.wait("its end", lambda: node.api.get(f"/sandboxes/{box.sandbox_id}").status_code == 404)
    assert node.tombstone(box.sandbox_id)["reason"] == "vmm_died"


@pytest.mark.parametrize("victim", ["blockd", "keeper"])
def test_storage_daemons_killed_under_load_cost_nothing(node: NodeUnderTest, sandbox: Sandbox, victim: str) -> None:
    load = (
        "for i in $(seq 200); do head -c 1M /dev/urandom > /home/user/f; sha256sum /home/user/f > /home/user/s; sync;"
    )
    load += " echo 3 > /proc/sys/vm/drop_caches; sha256sum -c --quiet /home/user/s || exit 9; done"
    running = sandbox.commands.run(load, background=True, user="root", timeout=0)
    for _ in range(5):
        before = node.daemon_pid(victim)
        os.kill(before, signal.SIGKILL)
        node.wait(f"another {victim}", lambda before=before: node.daemon_pid(victim) != before)  # type: ignore[misc]
        time.sleep(0.5)
    assert sandbox.commands.run("echo alive").stdout == "alive\n"
    running.kill()
    assert "error" not in sandbox.commands.run("dmesg | grep -iE 'i/o error|ext4-fs error' || true", user="root").stdout


def test_a_killed_proxy_is_replaced_and_sandboxes_go_on(node: NodeUnderTest, sandbox: Sandbox) -> None:
    ticker = sandbox.commands.run("sleep 1000", background=True)
    before = node.daemon_pid("proxy")
    os.kill(before, signal.SIGKILL)
    node.wait("another proxy", lambda: _answers(node) and node.daemon_pid("proxy") != before)
    assert any(process.pid == ticker.pid for process in sandbox.commands.list())


def test_kill_ends_although_blockd_is_stopped(node: NodeUnderTest) -> None:
    """The VMM waits for a page; its sandbox is gone at once, its slot only when the process is."""
    box = Sandbox.create("base", timeout=60)
    box.commands.run("true")
    pid = node.vmm_pid(box.sandbox_id)
    with _stopped(node.daemon_pid("keeper")), _stopped(node.daemon_pid("blockd")):
        threading.Thread(target=_touch_disk, args=(box,), daemon=True).start()
        time.sleep(1)
        started = time.monotonic()
        assert node.api.delete(f"/sandboxes/{box.sandbox_id}", timeout=30).status_code == 204
        assert time.monotonic() - started < 10
        assert node.api.get(f"/sandboxes/{box.sandbox_id}").status_code == 404
    node.wait("the process's end", lambda: not Path(f"/proc/{pid}").exists(), 30)


def test_streams_to_a_killed_sandbox_are_reset(node: NodeUnderTest) -> None:
    box = Sandbox.create("base", timeout=60)
    command = box.commands.run("echo begun; sleep 1000", background=True)
    killer = threading.Timer(0.5, lambda: node.api.delete(f"/sandboxes/{box.sandbox_id}"))
    killer.start()
    with pytest.raises(SandboxException, match=r"killed|end of life|not found"):
        command.wait()
    killer.join()


def _through_proxy(node: NodeUnderTest, sandbox_id: str, port: int, path: str = "/") -> httpx.Response:
    headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
    return httpx.get(node.running.sandbox_url + path, headers=headers, timeout=30)


def _answers(node: NodeUnderTest) -> bool:
    try:
        return node.api.get("/health").status_code == 204
    except httpx.TransportError:
        return False


def _touch_disk(box: Sandbox) -> None:
    try:
        box.commands.run(
            "echo 3 > /proc/sys/vm/drop_caches; find / -xdev -type f | head -500 | xargs cat > /dev/null",
            user="root",
            timeout=20,
        )
    except Exception:
        return


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
