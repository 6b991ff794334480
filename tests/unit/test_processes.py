"""Processes by record: alive, gone, or a number that belongs to another by now."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from agentenv.processes import RecordedProcess, recorded, start_time_ticks


def own_start_time() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def test_a_running_process_is_found_by_its_record(tmp_path: Path) -> None:
    """The record has the form of aenv-launch's."""
    record = tmp_path / "r.json"
    record.write_text(json.dumps({"pid": os.getpid(), "start_time_ticks": own_start_time(), "argv": ["x"]}))
    assert recorded(record) == RecordedProcess(os.getpid(), own_start_time(), ("x",))


def test_a_daemons_own_record_has_no_command_line(tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    record.write_text(json.dumps({"pid": os.getpid(), "start_time_ticks": own_start_time()}))
    assert recorded(record) == RecordedProcess(os.getpid(), own_start_time())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid":1}', '{"pid":"x","start_time_ticks":1}'])
def test_a_damaged_record_names_nobody(tmp_path: Path, content: str) -> None:
    """Neither does a missing one."""
    record = tmp_path / "r.json"
    assert recorded(record) is None
    record.write_text(content)
    assert recorded(record) is None


def test_another_process_under_the_same_number_is_not_signalled() -> None:
    """It would be us."""
    other = RecordedProcess(os.getpid(), own_start_time() - 1)
    assert not other.is_alive()
    other.signal(signal.SIGKILL)


@pytest.mark.parametrize("deaf", [False, True], ids=["obeys", "ignores SIGTERM"])
def test_stop_ends_a_process_for_good(deaf: bool) -> None:
    """It waits until the process is gone or a zombie: nobody but its parent can reap it."""
    script = "trap '' TERM; echo; read" if deaf else "echo; read"
    with subprocess.Popen(["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        ticks = start_time_ticks(child.pid)
        assert ticks is not None
        asyncio.run(RecordedProcess(child.pid, ticks).stop(0.05 if deaf else 10))
        assert start_time_ticks(child.pid) is None
    assert child.returncode == -(signal.SIGKILL if deaf else signal.SIGTERM)
