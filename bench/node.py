"""A node of one's own for a demo, a benchmark or a test: started on a free loopback port, removed without a trace.

Owns the processes `aenv server` and `aenv server clean` and a temporary state directory. Knows the node only as its
user does: by its command line and the JSON line that it prints when it is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

READY_S_MAX: Final = 900.0
STOP_S_MAX: Final = 60.0


class NodeFailed(Exception):
    """The node did not become ready; the message has the end of its log."""


@dataclass(frozen=True)
class RunningNode:
    """What a client needs, and where the node keeps its things."""

    api_url: str
    sandbox_url: str
    api_key: str
    accelerator: str
    state_dir: Path
    process: subprocess.Popen[str]

    def environment(self) -> dict[str, str]:
        """For the E2B SDKs and `aenv`."""
        return {
            "E2B_API_URL": self.api_url,
            "E2B_SANDBOX_URL": self.sandbox_url,
            "E2B_API_KEY": self.api_key,
        }


def free_port() -> int:
    """A port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def aenv() -> list[str]:
    """The command line of this checkout's `aenv`."""
    return [sys.executable, "-m", "agentenv.cli"]


def start_node(state_dir: Path, port: int, log: IO[str], *, ensure_base: bool = True, **settings: str) -> RunningNode:
    """Start `aenv server` and wait until it says that it is ready. `settings` are AENV_SECTION_KEY variables."""
    command = [*aenv(), "server", "--listen", f"127.0.0.1:{port}", "--state", str(state_dir)]
    command += ["--ensure-base"] if ensure_base else []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **settings},
        start_new_session=True,
    )
    timer = threading.Timer(READY_S_MAX, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        timer.cancel()
        if sys.exc_info()[0] is not None:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_S_MAX)
    if not line:
        process.wait()
        process.stdout.close()
        raise NodeFailed(f"the node ended with {process.returncode} before it was ready")
    ready = json.loads(line)
    return RunningNode(
        ready["api_url"], ready["sandbox_url"], ready["api_key"], ready["accelerator"], state_dir, process
    )


def stop_server(node: RunningNode) -> None:
    """SIGINT, as ctrl-C does; sandboxes go on."""
    if node.process.poll() is None:
        node.process.send_signal(signal.SIGINT)
        try:
            node.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
    if node.process.stdout is not None:
        node.process.stdout.close()


def clean(state_dir: Path, log: IO[str]) -> None:
    """Remove everything of a state directory: processes, mounts, namespaces, files."""
    command = [*aenv(), "server", "clean", "--state", str(state_dir)]
    subprocess.run(command, stdout=log, stderr=log, check=True, timeout=120, start_new_session=True)


@contextlib.contextmanager
def temporary_node(name: str, **settings: str) -> Iterator[RunningNode]:
    """A node in a fresh state directory; whatever happens, nothing of it is left afterwards."""
    state_dir = Path(tempfile.mkdtemp(prefix=f"aenv-{name}-", dir=os.environ.get("AENV_SCRATCH", "/var/tmp")))
    with _interrupt_as_exception():
        try:
            node = start_node(state_dir, free_port(), sys.stderr, **settings)
            try:
                yield node
            finally:
                stop_server(node)
        finally:
            with _no_interrupts():
                clean(state_dir, sys.stderr)
                shutil.rmtree(state_dir, ignore_errors=True)


@contextlib.contextmanager
def _interrupt_as_exception() -> Iterator[None]:
    """SIGTERM unwinds like ctrl-C does."""

    def unwind(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """A second ctrl-C must not stop the clean-up half way."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
