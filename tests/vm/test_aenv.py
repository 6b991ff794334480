"""The command `aenv` as a person uses it: real processes and terminals against a real node."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest
from bench.node import aenv

from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm

COMMAND_S_MAX = 60


@pytest.fixture
def box(node: NodeUnderTest) -> str:
    return run("create", "base", "--timeout", "300", "-q", "-m", "for=test", "-e", "GREETING=from create").strip()


def test_create_list_info_timeout_kill(node: NodeUnderTest, box: str) -> None:
    assert run("ls", "-q", "-m", "for=test").split() == [box]
    assert json.loads(run("ls", "--state", "paused")) == []
    info = json.loads(run("info", box))
    assert (info["state"], info["pauseSafety"], info["metadata"]) == ("running", None, {"for": "test"})
    run("timeout", box, "120")
    assert run("template", "ls").count('"base"') >= 1
    assert json.loads(run("node"))["driver"] == "qemu"
    run("kill", box)
    ended = aenv_process("info", box)
    assert (ended.returncode, json.loads(ended.stdout)["reason"]) == (3, "deleted")
    for words in (("info", "i" + "0" * 20), ("kill", box), ("exec", box, "--", "true")):
        gone = aenv_process(*words)
        assert gone.returncode == (125 if words[0] == "exec" else 3), gone
        assert gone.stderr.startswith(b"aenv: ")
        assert gone.stderr.count(b"\n") == 1


def test_exec_has_the_commands_exit_code_and_streams(node: NodeUnderTest, box: str) -> None:
    done = aenv_process("exec", box, "--", 'echo "$GREETING"; echo err >&2; exit 7')
    assert (done.returncode, done.stdout, done.stderr) == (7, b"from create\n", b"err\n")
    big = os.urandom(3 << 20)
    assert aenv_process("exec", box, "--", "cat", stdin=big).stdout == big
    assert run("exec", box, "--", "printf", "%s|", "a b", "$HOME", "'") == "a b|$HOME|'|"
    assert (
        run("exec", box, "-w", "/etc", "-u", "root", "-e", "X=1", "--", 'echo "$X $PWD $(id -un)"') == "1 /etc root\n"
    )
    assert aenv_process("exec", box, "--", "kill -9 $$").returncode == 128 + 9
    late = aenv_process("exec", box, "--timeout", "1", "--", "echo before; sleep 60")
    assert (late.returncode, late.stdout) == (124, b"before\n")
    pid = run("exec", box, "--detach", "--", "sleep 1; echo after; exit 4").strip()
    followed = aenv_process("exec", box, "--attach", pid)
    assert (followed.returncode, followed.stdout) == (4, b"after\n")


def test_ctrl_c_ends_the_remote_command(node: NodeUnderTest, box: str) -> None:
    command = [*aenv(), "exec", box, "--", "echo ready; exec sleep 1000"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(COMMAND_S_MAX) == 130
    assert json.loads(run("ps", box)) == []


def test_a_shell_on_a_terminal(node: NodeUnderTest, box: str) -> None:
    with Terminal("shell", box) as terminal:
        terminal.type("stty size; echo $((6*7))$GREETING\n")
        terminal.expect("30 100")
        terminal.expect("42from create")
        terminal.type("sleep 1000\n")
        time.sleep(1)
        terminal.type("\x03")
        terminal.type("echo interrupted $?\n")
        terminal.expect("interrupted 130")
        terminal.type("exit 9\n")
        assert terminal.process.wait(COMMAND_S_MAX) == 9


def test_cp_both_ways(node: NodeUnderTest, box: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "sub" / "data ü").write_bytes(os.urandom(100_000))
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("run.sh")
    run("cp", "-r", str(tree), f"{box}:/home/user/tree")
    assert run("exec", box, "--", "tree/link") == "ran\n"
    run("cp", "-r", f"{box}:/home/user/tree", str(tmp_path / "back"))
    back = tmp_path / "back"
    assert {str(path.relative_to(back)) for path in back.rglob("*")} == {
        str(path.relative_to(tree)) for path in tree.rglob("*")
    }
    assert (back / "sub" / "data ü").read_bytes() == (tree / "sub" / "data ü").read_bytes()
    assert (back / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (back / "link").readlink() == Path("run.sh")
    run("cp", str(tree / "run.sh"), f"{box}:one")
    run("cp", f"{box}:/home/user/one", str(tmp_path / "one"))
    assert (tmp_path / "one").read_bytes() == (tree / "run.sh").read_bytes()
    run("cp", "-", f"{box}:/home/user/piped", stdin=b"through a pipe")
    assert run("cp", f"{box}:/home/user/piped", "-") == "through a pipe"
    missing = aenv_process("cp", f"{box}:/home/user/none", str(tmp_path))
    assert missing.returncode != 0
    assert b"/home/user/none" in missing.stderr


def test_pause_resume_fork_snapshot(node: NodeUnderTest, box: str) -> None:
    run("exec", box, "--", "echo kept > state; nohup sleep 1000 > /dev/null 2>&1 & echo $! > /dev/shm/pid")
    run("pause", box)
    assert json.loads(run("info", box))["pauseSafety"] in ("held", "durable")
    refused = aenv_process("exec", box, "--", "true")
    assert (refused.returncode, refused.stderr) == (
        125,
        f"aenv: sandbox {box} is paused; run: aenv resume {box}\n".encode(),
    )
    node.wait_durable(box)
    assert json.loads(run("info", box))["pauseSafety"] == "durable"
    run("resume", box)
    check = "cat state; kill -0 $(cat /dev/shm/pid) && echo alive"
    assert run("exec", box, "--", check) == "kept\nalive\n"
    children = run("fork", box, "-n", "2", "-q", "--timeout", "120").split()
    assert len({box, *children}) == 3
    assert [run("exec", child, "--", check) for child in children] == ["kept\nalive\n"] * 2
    snapshot = run("snapshot", "create", box, "--name", "aenv-test", "-q").strip()
    assert snapshot in run("snapshot", "ls", "-q").split()
    from_it = run("create", "aenv-test", "-q", "--timeout", "60").strip()
    assert run("exec", from_it, "--", check) == "kept\nalive\n"
    run("snapshot", "rm", "aenv-test")
    assert aenv_process("create", snapshot).returncode == 3
    run("kill", box, from_it, *children)
    assert json.loads(run("ls", "-m", "for=test")) == []


def aenv_process(*words: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """`aenv WORDS...` to its end; standard input is /dev/null unless something is given."""
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run([*aenv(), *words], capture_output=True, timeout=COMMAND_S_MAX, **given)  # type: ignore[call-overload,no-any-return]


def run(*words: str, stdin: bytes | None = None) -> str:
    """What it printed; the test fails if it fails."""
    done = aenv_process(*words, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


class Terminal:
    """`aenv` on a terminal of 100 columns and 30 rows; this side is the person."""

    def __init__(self, *words: str) -> None:
        self._near, far = pty.openpty()
        termios.tcsetwinsize(self._near, (30, 100))
        self._seen = ""
        self.process = subprocess.Popen(
            [*aenv(), *words],
            stdin=far,
            stdout=far,
            stderr=far,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(far)

    def type(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def expect(self, text: str) -> None:
        """Read until `text` shows up; forget what came until then."""
        until = time.monotonic() + COMMAND_S_MAX
        while text not in self._seen:
            assert select.select([self._near], [], [], until - time.monotonic())[0], f"{text!r} not in {self._seen!r}"
            self._seen += os.read(self._near, 4096).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._near)
