"""Programs of the guest, which are real processes of this machine: how they begin, what they write, how they end."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from pathlib import Path
from typing import Any

from tests.unit.cli.fake_server.state import Running, State

GO_SIGNALS = {1: "hangup", 2: "interrupt", 9: "killed", 11: "segmentation fault", 15: "terminated"}


def spawn(state: State, argv: list[str], data: dict[str, Any], cwd: Path, env: dict[str, str]) -> Running:
    if "pty" in data:
        parent, child = pty.openpty()
        size = data["pty"]["size"]
        fcntl.ioctl(parent, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))
        state.sizes.append((size["cols"], size["rows"]))
        process = subprocess.Popen(
            # A controlling terminal, so that ctrl-C means something: the first terminal a session leader opens.
            ["env", "--default-signal", "/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(child), *argv],
            start_new_session=True, cwd=cwd, env=env, stdin=child, stdout=child, stderr=child,
        )  # fmt: skip
        running = Running(process, argv, terminal=parent)
        state.running[process.pid] = running
        os.close(child)
        threading.Thread(target=_read_terminal, args=(state, running)).start()
        return running
    stdin = subprocess.PIPE if data.get("stdin", True) else subprocess.DEVNULL
    process = subprocess.Popen(
        argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=env, start_new_session=True
    )
    running = Running(process, argv)
    state.running[process.pid] = running
    threading.Thread(target=_read_pipes, args=(state, running)).start()
    return running


def _read_pipes(state: State, running: Running) -> None:
    def pump(name: str, file: Any) -> None:
        while piece := os.read(file.fileno(), 32 * 1024):
            running.put({"data": {name: base64.b64encode(piece).decode()}})

    process = running.process
    threads = [threading.Thread(target=pump, args=("stdout", process.stdout))]
    threads += [threading.Thread(target=pump, args=("stderr", process.stderr))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.wait()
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            with contextlib.suppress(BrokenPipeError):
                file.close()
    state.running.pop(process.pid, None)
    running.put(_end_event(process.returncode))


def _read_terminal(state: State, running: Running) -> None:
    assert running.terminal is not None
    while True:
        try:
            piece = os.read(running.terminal, 32 * 1024)
        except OSError:
            break
        running.put({"data": {"pty": base64.b64encode(piece).decode()}})
    running.process.wait()
    os.close(running.terminal)
    running.terminal = None
    state.running.pop(running.process.pid, None)
    running.put(_end_event(running.process.returncode))


def _end_event(returncode: int) -> dict[str, Any]:
    if returncode < 0:
        status = "signal: " + GO_SIGNALS.get(-returncode, f"signal {-returncode}")
        # Only the kernel kills without being asked in these tests.
        error = f"{status} (out of memory)" if returncode == -9 else status
        return {"end": {"exitCode": -1, "exited": False, "status": status, "error": error}}
    return {"end": {"exitCode": returncode, "exited": True, "status": f"exit status {returncode}"}}
