"""exec, shell and cp against the built guest daemon, which runs on this machine as root.

The control plane is still the fake one; the client reaches the daemon through its sandbox URL.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli_cp import contents, make_tree
from test_cli_exec import WITH_INTERRUPTS
from test_cli_shell import Terminal
from tests.host import built

pytestmark = pytest.mark.host


@pytest.fixture
def daemon(server, environ, tmp_path):
    """The daemon's process, with `environ` pointing at it; its processes find an empty home."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    binary = built("aenv-envd") / "aenv-envd"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [binary, "--serve", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the daemon did not listen"
                time.sleep(0.01)
        environ["AENV_SANDBOX_URL"] = f"http://127.0.0.1:{port}"
        (tmp_path / "home").mkdir()
        yield process
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def run(daemon, server, aenv, tmp_path):
    """`aenv exec` as root with an empty home."""
    box = server.state.add()

    def run_command(*words, options=(), stdin=None):
        home = ("-u", "root", "-e", f"HOME={tmp_path}/home", *options)
        return aenv("exec", box, *home, "--", *words, stdin=stdin)

    return run_command


def test_exit_codes_and_streams(run):
    done = run("echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert run("printf", "%s|", "a b", "$HOME").stdout == b"a b|$HOME|"
    assert run("kill -9 $$").returncode == 137
    done = run("no-such-program", "x")
    assert (done.returncode, done.stderr.count(b"\n")) == (127, 1)


def test_large_input_and_output(run):
    data = os.urandom(3_000_000)
    assert run("cat", "-", stdin=data).stdout == data


def test_timeout_keeps_the_output(run):
    done = run("sh", "-c", "echo early; exec sleep 100", options=("--timeout", "2"))
    assert (done.returncode, done.stdout) == (124, b"early\n")


def test_refusals_are_named(run):
    assert run("true", options=("--cwd", "/no/such")).stderr == b"aenv: cwd '/no/such' does not exist\n"
    done = run("true", options=("-u", "nobody-here"))
    assert (done.returncode, done.stderr) == (125, b"aenv: invalid username: 'nobody-here'\n")


def test_detached_command_keeps_its_output_and_exit_code(run, server, aenv):
    pid = run("echo late; exit 4", options=("-d",)).stdout.decode().strip()
    done = aenv("exec", next(iter(server.state.sandboxes)), "--attach", pid)
    assert (done.returncode, done.stdout) == (4, b"late\n")


def test_copies_both_ways(daemon, server, aenv, tmp_path):
    box = server.state.add()
    make_tree(tmp_path / "tree")
    remote = f"{box}:{tmp_path}/remote"
    for arguments in (("-r", "tree", remote), ("-r", remote, "back")):
        done = aenv("cp", "-u", "root", *arguments)
        assert (done.returncode, done.stderr) == (0, b"")
    assert contents(tmp_path / "back") == contents(tmp_path / "tree")
    assert aenv("cp", "-u", "root", f"{box}:/proc/version", "-").stdout == Path("/proc/version").read_bytes()
    assert aenv("cp", "-u", "root", f"{box}:{tmp_path}/none", ".").returncode == 1


def test_shell(daemon, server, environ, tmp_path):
    arguments = ("shell", server.state.add(), "-u", "root", "-e", f"HOME={tmp_path}/home", "-e", "PS1=$ ")
    terminal = Terminal(arguments, environ, tmp_path)
    try:
        terminal.type(b"stty size\r")
        terminal.expect(b"33 91\r\n")
        terminal.resize(120, 50)
        # The new size travels on its own; the shell is asked until it has arrived.
        terminal.type(b"until [ \"$(stty size)\" = '50 120' ]; do sleep 0.01; done; echo re''sized\r")
        terminal.expect(b"resized\r\n")
        terminal.type(b"sh -c 'echo be\"\"gin; exec sleep 100'\r")
        terminal.expect(b"begin\r\n")
        terminal.type(b"\x03")
        terminal.type(b"echo code-$?\r")
        terminal.expect(b"code-130\r\n")
        terminal.type(b"exit 9\r")
        assert terminal.end() == 9
        assert terminal.is_restored()
    finally:
        terminal.close()


def test_interrupt_reaches_the_whole_process_group(daemon, server, environ, tmp_path):
    box = server.state.add()
    marker = tmp_path / "child"
    script = f"sleep 100 & echo $! > {marker}; echo ready; wait"
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_INTERRUPTS, "exec", box, "-u", "root", "-e", f"HOME={tmp_path}/home", "--", script],
        env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(2)
    process.communicate(timeout=20)
    assert process.returncode == 130
    stat = Path(f"/proc/{marker.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    # Whoever adopts the orphan may be slow to collect it, or (in a container) never do.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)
