"""Runs a host tool for a build: with a deadline, its output as progress, and nothing of it left after a cancel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence

from agentenv.errors import HostUnsuitable, ImageError

# What an error message quotes of a tool that failed.
_TAIL_LINES = 12
_LINE_BYTES_MAX = 64 << 10


async def run_command(
    command: Sequence[str], deadline_s: float, what: str, on_line: Callable[[str], None] | None = None
) -> None:
    """Run `command` to its end; `what` completes "cannot ...". Raises `ImageError`, `HostUnsuitable` (no such tool).

    The tool leads a process group, which is killed when it is late or the caller is cancelled.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
            env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except FileNotFoundError as error:
        raise HostUnsuitable(f"cannot {what}: {command[0]} is not installed") from error
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        async with asyncio.timeout(deadline_s):
            await _follow(process, tail, on_line)
            code = await process.wait()
    except TimeoutError as error:
        raise ImageError(f"cannot {what}: {command[0]} took more than {deadline_s:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    if code != 0:
        raise ImageError(f"cannot {what}: {command[0]} exited with {code}: {' | '.join(tail)}")


async def _follow(process: asyncio.subprocess.Process, tail: deque[str], on_line: Callable[[str], None] | None) -> None:
    assert process.stdout is not None, "asked for a pipe above"
    while True:
        try:
            raw = await process.stdout.readline()
        except ValueError:
            # A line beyond the limit was dropped; it is only output.
            continue
        if not raw:
            return
        line = raw.decode(errors="replace").rstrip()
        if line:
            tail.append(line)
            if on_line is not None:
                on_line(line)
