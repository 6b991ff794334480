"""`aenv exec` as a real process: exit codes, streams, input, signals, and what it says when the stream breaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest


def test_several_words_run_without_a_shell(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--", "printf", "%s|", "a b", "$HOME", "*", "é\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b|$HOME|*|é\n|".encode(), b"")


def test_one_word_runs_through_the_shell(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--", "echo one | tr a-z A-Z; exit 7")
    assert (done.returncode, done.stdout) == (7, b"ONE\n")


def test_one_word_without_a_shell(server, aenv):
    box = server.state.add()
    assert aenv("exec", "--no-shell", box, "--", "true").returncode == 0
    start = server.state.requests[-1][3]
    assert json.loads(start[5:])["process"]["cmd"] == "true"


def test_options_after_the_command_belong_to_the_command(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "-e", "A=1", "sh", "-c", "echo $A $0", "--user")
    assert done.stdout == b"1 --user\n"


def test_output_goes_to_the_right_streams_as_bytes(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--", r"printf '\377\000out'; printf '\376err' >&2")
    assert (done.stdout, done.stderr) == (b"\xff\x00out", b"\xfeerr")


def test_large_output_arrives_whole(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--", "head -c 5000000 /dev/zero; echo end")
    assert (len(done.stdout), done.stdout[-4:]) == (5_000_004, b"end\n")


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("TERM", 143), ("HUP", 129)])
def test_death_by_signal_is_128_plus_n(server, aenv, name, code):
    box = server.state.add()
    done = aenv("exec", box, "--", f"kill -{name} $$")
    assert done.returncode == code
    assert done.stderr == (b"aenv: signal: killed (out of memory)\n" if name == "KILL" else b"")


def test_missing_program_is_127(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--", "no-such-program", "x")
    assert (done.returncode, done.stderr) == (127, b"no-such-program: not found\n")


def test_piped_input_is_sent_to_its_end(server, aenv):
    box = server.state.add()
    data = bytes(range(256)) * 2000
    assert aenv("exec", box, "--", "cat", "-", stdin=data).stdout == data


def test_empty_piped_input_is_an_end_of_file(server, aenv):
    box = server.state.add()
    assert aenv("exec", box, "--", "wc", "-c", stdin=b"").stdout.strip() == b"0"


def test_input_that_nobody_reads_does_not_hold_the_end_up(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--", "exec 0<&-; echo done", stdin=b"x" * 1_000_000)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_without_input_the_command_gets_dev_null(server, aenv):
    box = server.state.add()
    aenv("exec", box, "--", "true")
    aenv("exec", "-I", box, "--", "true", stdin=b"unused")
    starts = [json.loads(body[5:]) for _, path, _, body in server.state.requests if path.endswith("/Start")]
    assert [start["stdin"] for start in starts] == [False, False]


def test_env_cwd_and_user_are_passed(server, aenv):
    box = server.state.add()
    (server.state.root / "srv" / "a b").mkdir(parents=True)
    arguments = ("-e", "X=a=b\nc", "-e", "FROM_HERE", "--cwd", "/srv/a b", "--user", "root")
    done = aenv("exec", box, *arguments, "--", 'echo "$X" $FROM_HERE; pwd', env={"FROM_HERE": "here"})
    assert done.stdout.decode() == f"a=b\nc here\n{server.state.root}/srv/a b\n"
    headers = next(headers for _, path, headers, _ in server.state.requests if path.endswith("/Start"))
    assert headers["authorization"] == "Basic cm9vdDo="
    assert headers["e2b-sandbox-id"] == box
    assert headers["e2b-sandbox-port"] == "49983"
    assert headers["x-access-token"] == f"token-{box}"
    assert "x-api-key" not in headers


def test_missing_cwd_is_named(server, aenv):
    done = aenv("exec", server.state.add(), "--cwd", "/nope", "--", "true")
    assert (done.returncode, done.stderr) == (125, b"aenv: cwd '/nope' does not exist\n")


def test_timeout_is_124(server, aenv):
    box = server.state.add()
    done = aenv("exec", box, "--timeout", "0.2", "--", "echo early; exec sleep 100")
    assert (done.returncode, done.stdout) == (124, b"early\n")
    assert done.stderr == b"aenv: the command did not end within 0.2 s and was killed\n"


def test_detached_command_runs_on_and_can_be_followed(server, aenv, environ, tmp_path):
    box = server.state.add()
    done = aenv("exec", "-d", box, "--", "while [ ! -e go ]; do sleep 0.01; done; echo went; exit 3")
    pid = int(done.stdout)
    assert json.loads(aenv("ps", box).stdout)[0]["pid"] == pid
    follower = start_process(environ, tmp_path, "exec", box, "--attach", str(pid))
    wait_for(lambda: server.state.requests[-1][1].endswith("/Connect"), "attaching")
    (server.state.root / "home" / "go").touch()
    out, _ = follower.communicate(timeout=20)
    assert (follower.returncode, out) == (3, b"went\n")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("reset", "broke"),
        ("half", "in the middle of a message (13 bytes"),
        ("no-end-frame", "without its end frame"),
        ("no-end-event", "without saying how the process ended"),
        ("compressed", "flags 0x1"),
        ("huge", "above the limit"),
        ("not-json", "not JSON"),
        ("internal", "it is internal"),
        ("aborted", "it is aborted"),
        ("paused", "was paused while the command ran"),
        ("killed", "the sandbox ended while the command ran"),
    ],
)
def test_a_broken_stream_is_125_with_the_reason_and_keeps_the_output(server, aenv, kind, text):
    done = aenv("exec", server.state.add(), "--no-shell", "--", f"fault:{kind}")
    assert done.returncode == 125
    assert text in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b"before\n"


def test_a_stream_without_start_event_is_refused(server, aenv):
    done = aenv("exec", server.state.add(), "--no-shell", "--", "fault:no-start")
    assert (done.returncode, b"start event" in done.stderr) == (125, True)


def test_paused_sandbox_is_refused_with_the_way_out(server, aenv):
    box = server.state.add(state="paused")
    done = aenv("exec", box, "--", "true")
    assert (done.returncode, done.stderr.decode()) == (125, f"aenv: sandbox {box} is paused; run: aenv resume {box}\n")


def test_unknown_sandbox_is_125(server, aenv):
    done = aenv("exec", "inone", "--", "true")
    assert (done.returncode, done.stderr) == (125, b"aenv: sandbox inone not found: deleted\n")


def test_a_command_is_required(server, aenv):
    done = aenv("exec", server.state.add())
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"aenv: give either a COMMAND or --attach PID")


# A test run that was started in the background has inherited an ignored SIGINT.
WITH_INTERRUPTS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from agentenv.cli import main
main()
"""


def start_process(environ, tmp_path, *args):
    return subprocess.Popen(
        [sys.executable, "-c", WITH_INTERRUPTS, *args],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(condition, what):
    """Poll: the other side is a process of its own, there is nothing to await."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)


def test_first_interrupt_terminates_and_ends_with_130(server, environ, tmp_path):
    box = server.state.add()
    script = "trap 'echo bye; exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    process = start_process(environ, tmp_path, "exec", box, "--", script)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    # The shell in the sandbox may say on stderr that its sleep was terminated.
    assert (process.returncode, out, b"aenv" in err) == (130, b"bye\n", False)
    assert [name for _, name in server.state.signals] == ["SIGNAL_SIGTERM"]


def test_second_interrupt_kills(server, environ, tmp_path):
    box = server.state.add()
    script = "trap 'echo stubborn' TERM; echo ready; while :; do sleep 0.01; done"
    process = start_process(environ, tmp_path, "exec", box, "--", script)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"stubborn\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert [name for _, name in server.state.signals] == ["SIGNAL_SIGTERM", "SIGNAL_SIGKILL"]


def test_an_ignored_signal_stays_ignored(server, environ, tmp_path):
    box = server.state.add()
    script = "echo ready; while [ ! -e go ]; do sleep 0.01; done; echo went"
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-m", "agentenv.cli", "exec", box, "--", script],
        env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    (server.state.root / "home" / "go").touch()
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out, server.state.signals) == (0, b"went\n", [])


def test_closed_standard_streams_are_no_error(server, environ, tmp_path):
    box = server.state.add()
    for words in (["exec", box, "--", "echo x; exit 4"], ["ls"]):
        command = ["sh", "-c", '"$@" >&- 2>&- <&-', "sh", sys.executable, "-m", "agentenv.cli", *words]
        done = subprocess.run(command, env=environ, cwd=tmp_path, check=False)
        assert done.returncode == (4 if words[0] == "exec" else 0)


def test_a_reader_that_goes_away_ends_the_command_quietly(server, environ, tmp_path):
    box = server.state.add()
    process = start_process(environ, tmp_path, "exec", box, "--", "yes")
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait(timeout=20) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    wait_for(lambda: not server.state.running, "the end of the remote command")


def test_a_slow_reader_does_not_stop_the_network(server, environ, tmp_path):
    box = server.state.add()
    process = start_process(environ, tmp_path, "exec", box, "--", "head -c 3000000 /dev/zero")
    wait_for(lambda: not server.state.running and server.state.requests, "taking all output off the network")
    out, _ = process.communicate(timeout=20)
    assert len(out) == 3_000_000
    assert os.waitstatus_to_exitcode(process.returncode) == 0
