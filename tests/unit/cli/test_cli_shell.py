"""`aenv shell` on a real pseudo-terminal: keys, size, exit code, and the terminal as it was before."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

WAIT_S = 20


class Terminal:
    """`aenv` on a terminal of its own; this side is the person."""

    def __init__(self, args, environ, cwd, cols=91, rows=33):
        self.parent, self.child = pty.openpty()
        self.resize(cols, rows)
        self.before = termios.tcgetattr(self.child)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, *args],
            env=environ,
            cwd=cwd,
            stdin=self.child,
            stdout=self.child,
            stderr=self.child,
            start_new_session=True,
        )

    def resize(self, cols, rows):
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys):
        os.write(self.parent, keys)

    def expect(self, text):
        """Read until `text` shows up; gives what came before it and forgets both."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} not in {self.seen!r}"
            if select.select([self.parent], [], [], left)[0]:
                self.seen += os.read(self.parent, 4096)
        before, _, self.seen = self.seen.partition(text)
        return before

    def end(self):
        code = self.process.wait(timeout=WAIT_S)
        while select.select([self.parent], [], [], 0)[0]:
            self.seen += os.read(self.parent, 4096)
        return code

    def is_restored(self):
        return termios.tcgetattr(self.child) == self.before

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for descriptor in (self.parent, self.child):
            if descriptor >= 0:
                os.close(descriptor)


# The session's first opened terminal becomes its controlling one, which SIGWINCH needs.
RUNNER = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
sys.argv[0] = "aenv"
from agentenv.cli import main
main()
"""


@pytest.fixture
def terminal(server, environ, tmp_path):
    made = []

    def make(*args, **size):
        made.append(Terminal(args, {**environ, "PS1": "$ "}, tmp_path, **size))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture
def shell(server, terminal):
    """A shell that has come up and waits for a key: between two commands its terminal is in another mode, in which a
    ctrl-D becomes a zero byte for the line editor that follows."""
    box = server.state.add()
    opened = terminal("shell", box)
    opened.type(b"PS1='rea''dy> '\r")
    opened.expect(b"ready> ")
    return opened


def test_exit_code_of_the_shell_is_ours_and_the_terminal_comes_back(shell):
    shell.type(b"exit 7\r")
    assert shell.end() == 7
    assert shell.is_restored()


def test_ctrl_d_ends_the_shell(shell):
    shell.type(b"\x04")
    assert shell.end() == 0
    assert shell.is_restored()


def test_ctrl_c_interrupts_the_remote_command_only(shell):
    # Printed by the child, which therefore is in the foreground when ctrl-C comes.
    shell.type(b"sh -c 'echo be\"\"gin; exec sleep 100'\r")
    shell.expect(b"begin\r\n")
    shell.type(b"\x03")
    shell.type(b"echo code-$?\r")
    shell.expect(b"code-130\r\n")
    shell.type(b"exit 0\r")
    assert shell.end() == 0


def test_size_is_passed_at_start_and_follows_changes(server, shell):
    assert server.state.sizes == [(91, 33)]
    shell.resize(120, 50)
    deadline = time.monotonic() + WAIT_S
    while server.state.sizes[-1] != (120, 50):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    shell.type(b"stty size\r")
    shell.expect(b"50 120\r\n")


def test_keys_and_output_are_bytes(shell):
    shell.type("echo 'é€\U0001f600' | od -An -tx1\r".encode())
    shell.expect(b" c3 a9 e2 82 ac f0 9f 98 80 0a\r\n")


def test_pasted_text_arrives_in_order_and_whole(shell):
    shell.type(b"stty -echo; cat > pasted\r")
    text = b"".join(b"line %d\n" % number for number in range(2000))
    for start in range(0, len(text), 1000):
        shell.type(text[start : start + 1000])
    shell.type(b"\x04")
    shell.type(b"md5sum pasted; stty echo\r")
    import hashlib

    shell.expect(hashlib.md5(text).hexdigest().encode())


def test_sigterm_ends_the_remote_shell_and_restores_the_terminal(server, shell):
    shell.process.send_signal(signal.SIGTERM)
    assert shell.end() == 143
    assert shell.is_restored()
    assert [name for _, name in server.state.signals] == ["SIGNAL_SIGKILL"]


def test_terminal_that_goes_away_ends_the_remote_shell(server, shell):
    os.close(shell.parent)
    os.close(shell.child)
    shell.parent = shell.child = -1
    shell.process.wait(timeout=WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while not server.state.signals:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_cut_connection_restores_the_terminal_and_says_why(server, shell):
    # The sandbox dies: the daemon's process is gone and the stream is reset.
    server.drop_streams()
    assert shell.end() == 125
    assert shell.is_restored()
    assert b"aenv: " in shell.seen


def test_without_terminal_it_refuses(server, aenv):
    done = aenv("shell", server.state.add())
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"aenv: shell needs a terminal")


def test_unknown_sandbox_leaves_the_terminal_alone(server, terminal):
    opened = terminal("shell", "inone")
    assert opened.end() == 125
    assert opened.is_restored()
    assert b"aenv: sandbox inone not found: deleted\r\n" in opened.seen
