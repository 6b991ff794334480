"""Who a guest is, and what time it thinks it is, after each way of starting one."""

from __future__ import annotations

import time

import pytest
from e2b import PtySize, Sandbox

from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm

CLOCK_SKEW_S_MAX = 0.5


def test_a_guest_knows_its_sandbox_and_its_environment(node: NodeUnderTest) -> None:
    box = Sandbox.create("base", timeout=60, envs={"GREETING": "two  words ü", "PATH_LIKE": "$HOME"})
    names = "E2B_SANDBOX E2B_SANDBOX_ID E2B_TEMPLATE_ID GREETING PATH_LIKE"
    said = box.commands.run(f'for name in {names}; do echo "${{!name}}"; done').stdout.splitlines()
    assert said == ["true", box.sandbox_id, box.get_info().template_id, "two  words ü", "$HOME"]
    assert box.commands.run("echo $GREETING", envs={"GREETING": "mine"}).stdout == "mine\n"
    assert _of_shell(box, "printenv GREETING") == "two  words ü"
    hostname = box.commands.run("hostname").stdout.strip()
    assert hostname == box.files.read("/etc/hostname").strip()
    assert box.sandbox_id in hostname
    assert hostname in box.files.read("/etc/hosts")
    assert box.files.read("/run/e2b/.E2B_SANDBOX_ID").strip() == box.sandbox_id


def test_forks_and_snapshots_are_others_and_a_resume_is_the_same(node: NodeUnderTest, sandbox: Sandbox) -> None:
    before = _identity(sandbox)
    sandbox.pause()
    sandbox.connect(timeout=300)
    assert _identity(sandbox) == before
    snapshot = sandbox.create_snapshot()
    others = [*sandbox.fork(count=2, timeout=60), *(Sandbox.create(snapshot.snapshot_id, timeout=60) for _ in range(2))]
    assert all(isinstance(other, Sandbox) for other in others)
    seen = [before, *(_identity(other) for other in others if isinstance(other, Sandbox))]
    for part in zip(*seen, strict=True):
        assert len(set(part)) == len(seen), part
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_the_clock_is_right_before_the_first_command(node: NodeUnderTest, sandbox: Sandbox) -> None:
    _assert_clock(sandbox, "created")
    sandbox.pause()
    time.sleep(3)
    sandbox.connect(timeout=300)
    _assert_clock(sandbox, "resumed while held")
    sandbox.pause()
    node.wait_durable(sandbox.sandbox_id)
    sandbox.connect(timeout=300)
    _assert_clock(sandbox, "resumed from disk")
    child = sandbox.fork(timeout=60)[0]
    assert isinstance(child, Sandbox)
    _assert_clock(child, "forked")
    _assert_clock(sandbox, "forked from")


def test_a_program_that_runs_across_a_pause_sees_no_wrong_time_afterwards(
    node: NodeUnderTest, sandbox: Sandbox
) -> None:
    """The clock is set before anything from outside reaches the guest; a running program may see it a moment late."""
    sandbox.commands.run("while :; do date +%s.%N; sleep 0.02; done > /dev/shm/dates", background=True, timeout=0)
    sandbox.pause()
    time.sleep(3)
    started = time.time()
    sandbox.connect(timeout=300)
    answered = time.time()
    time.sleep(1)
    dates = [float(line) for line in sandbox.files.read("/dev/shm/dates").split("\n")[:-1]]
    assert dates == sorted(dates), "time ran backwards"
    wrong = [date for date in dates if answered - 3 < date < started - CLOCK_SKEW_S_MAX]
    assert len(wrong) <= 10, f"{len(wrong)} dates inside the pause"
    assert any(date >= started - CLOCK_SKEW_S_MAX for date in dates)


def _identity(box: Sandbox) -> tuple[str, ...]:
    """Sandbox id, host name, machine id and token: what must differ between any two sandboxes."""
    said = box.commands.run("hostname; cat /etc/machine-id; echo $E2B_SANDBOX_ID").stdout.split()
    assert box.files.read("/etc/hostname").strip() == said[0]
    assert said[2] == box.sandbox_id
    return *said, str(box.connection_config.sandbox_headers.get("X-Access-Token"))


def _assert_clock(box: Sandbox, moment: str) -> None:
    """The guest's clock at the very first request, by the time that a new file gets: cheaper than a command."""
    before = time.time()
    entry = box.files.write("/dev/shm/now", "x")
    after = time.time()
    modified = box.files.get_info(entry.path).modified_time.timestamp()
    assert before - CLOCK_SKEW_S_MAX < modified < after + CLOCK_SKEW_S_MAX, moment


def _of_shell(box: Sandbox, command: str) -> str:
    """What a command says in an interactive terminal."""
    seen: list[bytes] = []
    shell = box.pty.create(size=PtySize(cols=80, rows=24), timeout=30)
    box.pty.send_stdin(shell.pid, f"stty -echo; echo '<'\"$({command})\"'>'; exit\n".encode())
    shell.wait(on_pty=seen.append)
    return b"".join(seen).decode().rpartition("<")[2].partition(">")[0]
