"""The unmodified E2B SDK's walk through a sandbox's life."""

from __future__ import annotations

import time

import pytest
from e2b import CommandExitException, NotFoundException, Sandbox, TimeoutException
from e2b.exceptions import SandboxException

from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm


def test_commands_in_all_their_forms(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("echo out; echo err >&2").stdout == "out\n"
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo partial; exit 7")
    assert (failed.value.exit_code, failed.value.stdout) == (7, "partial\n")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 30", timeout=1)
    with pytest.raises(CommandExitException) as missing:
        sandbox.commands.run("no-such-command-anywhere")
    assert missing.value.exit_code == 127
    background = sandbox.commands.run("cat; echo ended", background=True, stdin=True)
    sandbox.commands.send_stdin(background.pid, "through stdin\n")
    assert any(process.pid == background.pid for process in sandbox.commands.list())
    assert sandbox.commands.kill(background.pid)
    assert not sandbox.commands.kill(background.pid)


def test_a_timed_out_command_is_killed_with_its_children(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 987 & sleep 988", timeout=1)
    assert "98" not in sandbox.commands.run("pgrep -af 'sleep 98[78]' | grep -v pgrep || true").stdout


def test_a_terminal(sandbox: Sandbox) -> None:
    seen: list[bytes] = []
    terminal = sandbox.pty.create(size=_size(80, 24), timeout=60)
    sandbox.pty.resize(terminal.pid, _size(132, 50))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 3\n")
    result = None
    try:
        result = terminal.wait(on_pty=seen.append)
    except CommandExitException as ended:
        assert ended.exit_code == 3
    assert result is None
    assert b"50 132" in b"".join(seen)


def test_files(sandbox: Sandbox) -> None:
    big = bytes(range(256)) * 4096
    sandbox.files.write("deep/er/big.bin", big)
    assert bytes(sandbox.files.read("/home/user/deep/er/big.bin", format="bytes")) == big
    for name in ("ein name mit ü und 空.txt", "line\nbreak", "-dash", "' \"quotes"):
        sandbox.files.write(f"/home/user/odd/{name}", name)
        assert sandbox.files.read(f"/home/user/odd/{name}") == name
    assert {entry.name for entry in sandbox.files.list("/home/user/odd")} >= {"line\nbreak", "-dash"}
    sandbox.files.write("/home/user/empty", "")
    assert sandbox.files.read("/home/user/empty") == ""
    sandbox.files.rename("/home/user/empty", "/home/user/renamed")
    assert sandbox.files.exists("/home/user/renamed")
    assert not sandbox.files.exists("/home/user/empty")
    assert sandbox.files.make_dir("/home/user/dir")
    assert not sandbox.files.make_dir("/home/user/dir")
    sandbox.files.remove("/home/user/dir")
    with pytest.raises(NotFoundException):
        sandbox.files.read("/home/user/none")
    assert "Linux" in sandbox.files.read("/proc/version")


def test_ten_pauses_keep_every_write_and_the_process(node: NodeUnderTest, sandbox: Sandbox) -> None:
    ticker = sandbox.commands.run(
        "i=0; while true; do i=$((i+1)); echo $i > /tmp/.tick; mv /tmp/.tick /tmp/tick; sleep 0.1; done",
        background=True,
    )
    for cycle in range(10):
        sandbox.files.write(f"/home/user/cycle{cycle}", f"written in cycle {cycle}")
        sandbox.pause()
        assert not sandbox.is_running()
        if cycle % 2:
            node.wait_durable(sandbox.sandbox_id)
        sandbox.connect(timeout=300)
        for earlier in range(cycle + 1):
            assert sandbox.files.read(f"/home/user/cycle{earlier}") == f"written in cycle {earlier}"
        before = time.time()
        guest = float(sandbox.commands.run("date +%s.%N").stdout)
        assert before - 0.5 < guest < time.time() + 0.5
    ticks = int(sandbox.files.read("/tmp/tick"))
    time.sleep(1)
    assert int(sandbox.files.read("/tmp/tick")) > ticks
    assert any(process.pid == ticker.pid for process in sandbox.commands.list())
    assert "Journal" not in sandbox.commands.run("dmesg 2>/dev/null | grep -iE 'ext4.*error' || true").stdout


def test_a_snapshot_starts_as_the_sandbox_was(node: NodeUnderTest, sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/state", "before")
    snapshot = sandbox.create_snapshot()
    sandbox.files.write("/home/user/state", "after")
    other = Sandbox.create(snapshot.snapshot_id, timeout=60)
    assert other.files.read("/home/user/state") == "before"
    assert sandbox.files.read("/home/user/state") == "after"
    other.kill()
    assert [s.snapshot_id for s in sandbox.list_snapshots().next_items()] == [snapshot.snapshot_id]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)
    with pytest.raises(SandboxException):
        Sandbox.create(snapshot.snapshot_id)


@pytest.mark.parametrize("count", [3, 16])
def test_forks_have_everything_of_their_source(node: NodeUnderTest, sandbox: Sandbox, count: int) -> None:
    source = sandbox.get_info()
    ticker = sandbox.commands.run("exec -a ticker sleep 1000", background=True)
    sandbox.commands.run("echo in-memory > /dev/shm/state; echo on-disk > /home/user/state; sync")
    children = sandbox.fork(count=count, timeout=120)
    assert len(children) == count
    randoms = set()
    for child in children:
        assert isinstance(child, Sandbox)
        info = child.get_info()
        assert (info.cpu_count, info.memory_mb) == (source.cpu_count, source.memory_mb)
        said = child.commands.run(
            f"cat /dev/shm/state /home/user/state; kill -0 {ticker.pid} && echo alive; "
            "head -c 16 /dev/urandom | od -An -tx1; hostname; cat /etc/machine-id"
        ).stdout
        assert said.startswith("in-memory\non-disk\nalive\n")
        randoms.add(said)
    assert len(randoms) == count
    children[0].files.write("/home/user/state", "mine")
    assert children[1].files.read("/home/user/state") == "on-disk\n"
    assert sandbox.files.read("/home/user/state") == "on-disk\n"
    for child in children:
        child.kill()


@pytest.mark.parametrize("count", [0, -1, 101])
def test_fork_counts_out_of_range_are_refused(node: NodeUnderTest, sandbox: Sandbox, count: int) -> None:
    answer = node.api.post(f"/sandboxes/{sandbox.sandbox_id}/fork", json={"count": count})
    assert answer.status_code == 400
    assert "count" in answer.json()["message"]


def test_expiry_pauses_by_default_and_connect_wakes_it(node: NodeUnderTest) -> None:
    box = Sandbox.create("base", timeout=5)
    sleeper = box.commands.run("sleep 1000", background=True)
    box.files.write("/home/user/kept", "yes")
    time.sleep(7)
    assert box.get_info().state.value == "paused"
    box.connect(timeout=60)
    assert box.files.read("/home/user/kept") == "yes"
    assert any(process.pid == sleeper.pid for process in box.commands.list())


def test_expiry_deletes_only_when_told_so(node: NodeUnderTest) -> None:
    body = {"templateID": "base", "timeout": 3, "autoPause": False}
    sandbox_id = node.api.post("/v2/sandboxes", json=body).raise_for_status().json()["sandboxID"]
    node.wait("its end", lambda: node.api.get(f"/sandboxes/{sandbox_id}").status_code == 404)
    assert node.tombstone(sandbox_id)["reason"] == "expired"


def _size(columns: int, rows: int):  # type: ignore[no-untyped-def]
    from e2b import PtySize

    return PtySize(cols=columns, rows=rows)
