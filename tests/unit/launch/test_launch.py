"""aenv-launch as the server uses it: the program outlives its caller, and enters a namespace of the host.

The binary's own tests (crates/launch) cover the options; these need a caller that dies, or root.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.host import built

DEADLINE_S = 10.0


def _wait_for_record(path: Path) -> dict[str, Any]:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if path.exists():
            record: dict[str, Any] = json.loads(path.read_text())
            return record
    raise AssertionError(f"no record at {path} after {DEADLINE_S} s")


def _is_alive(record: dict[str, Any]) -> bool:
    try:
        stat = Path(f"/proc/{record['pid']}/stat").read_text()
    except FileNotFoundError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] != "Z" and int(fields[19]) == record["start_time_ticks"]


@pytest.fixture
def record_path(tmp_path: Path) -> Iterator[Path]:
    """Where the record goes; the recorded process is killed after the test."""
    path = tmp_path / "record"
    yield path
    if path.exists():
        record = json.loads(path.read_text())
        if _is_alive(record):
            os.kill(record["pid"], signal.SIGKILL)


def _command(record: Path, *program: str, options: tuple[str, ...] = ()) -> list[str]:
    launcher, log = built("aenv-launch") / "aenv-launch", record.with_name("log")
    return [str(launcher), "--record", str(record), "--log", str(log), *options, "--", *program]


def test_the_program_survives_the_death_of_its_caller_and_of_the_group(record_path: Path) -> None:
    """A caller in its own group starts the program and hangs; then the whole group is killed."""
    command = _command(record_path, "/bin/sleep", "60")
    script = f"import subprocess, sys; subprocess.run({command!r}, check=True); sys.stdin.read()"
    caller = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdin=subprocess.PIPE)
    with caller:
        record = _wait_for_record(record_path)
        os.killpg(caller.pid, signal.SIGKILL)
    assert caller.returncode == -signal.SIGKILL
    assert _is_alive(record)


def test_the_call_returns_although_the_program_goes_on_writing(record_path: Path) -> None:
    """Pipes of the caller must not stay open in the program, or reading its output would never end."""
    command = _command(record_path, "/bin/sh", "-c", "echo started; exec sleep 60")
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert json.loads(done.stdout) == json.loads(record_path.read_text())
    assert done.stderr == ""


@pytest.mark.host
def test_the_program_runs_in_the_named_namespace(record_path: Path) -> None:
    name = f"aenv-launch-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(
            _command(record_path, "/bin/sleep", "60", options=("--netns", name)), check=True, stdout=subprocess.DEVNULL
        )
        pid = json.loads(record_path.read_text())["pid"]
        assert os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{name}").st_ino
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def test_a_launch_costs_less_than_three_milliseconds_more_than_the_exec(record_path: Path) -> None:
    """In processor time of all three processes, the median of 20: the clock on the wall measures the other tests too.

    The program is a `cat` that prints its own time so far, which includes what happened between fork and exec.
    """

    def cpu_s(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    program = ["/bin/cat", "/proc/self/schedstat"]
    log, extra = record_path.with_name("log"), []
    for number in range(1, 21):
        launcher_s = cpu_s(_command(record_path, *program))
        lines = _wait_for_lines(log, number)
        extra.append(launcher_s + int(lines[-1].split()[0]) / 1e9 - cpu_s(program))
    print(f"{statistics.median(extra) * 1e3:.2f} ms")
    assert statistics.median(extra) < 0.003


def _wait_for_lines(log: Path, count: int) -> list[str]:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        lines = log.read_text().splitlines(keepends=True)
        if len(lines) >= count and lines[-1].endswith("\n"):
            return lines
    raise AssertionError(f"fewer than {count} lines in {log} after {DEADLINE_S} s")
