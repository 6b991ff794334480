"""Running a remote command in the foreground or leaving it in the background; used by `exec`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

import click

from agentenv.cli import streams
from agentenv.cli.output import complain, print_json, wants_json
from agentenv.cli.session import open_running, run
from agentenv.cli.settings import Settings
from agentenv.client import AenvClient, Ended, Process, Sandbox, Stderr
from agentenv.client.errors import (
    ApiError,
    ClientError,
    Conflict,
    ConnectionLost,
    DeadlineExceeded,
    NotFound,
    SandboxUnreachable,
)
from agentenv.client.process import feed

EXIT_TIMED_OUT: Final = 124
EXIT_AENV_FAILED: Final = 125
# The daemon kills at the timeout; this is for a daemon that does not.
TIMEOUT_GRACE_S: Final = 10.0
FAREWELL_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Request:
    """What `aenv exec` was asked for. `command` as text goes through a shell."""

    sandbox_id: str
    command: str | list[str]
    user: str | None
    cwd: str | None
    env: dict[str, str]
    timeout_s: float | None
    stdin: bool | None
    attach_pid: int | None


def detached(settings: Settings, request: Request) -> int:
    """Start it, print its pid, leave."""

    async def work(client: AenvClient) -> int:
        sandbox = await open_running(client, request.sandbox_id)
        async with _process(sandbox, request, stdin=False) as process:
            return process.pid

    pid = run(settings, work)
    if wants_json(settings) and settings.json:
        print_json({"pid": pid})
    else:
        click.echo(pid)
    return 0


def foreground(settings: Settings, request: Request) -> int:
    """Run it to its end with our standard streams; gives the exit code."""

    async def work(client: AenvClient) -> int:
        sandbox = await open_running(client, request.sandbox_id)
        try:
            return await _followed(sandbox, request)
        except (ConnectionLost, SandboxUnreachable) as error:
            raise await _explained(client, request.sandbox_id, error) from error

    return run(settings, work)


def _process(sandbox: Sandbox, request: Request, *, stdin: bool) -> AbstractAsyncContextManager[Process]:
    if request.attach_pid is not None:
        return sandbox.attach(request.attach_pid, timeout_s=request.timeout_s)
    return sandbox.start(
        request.command,
        env=request.env,
        cwd=request.cwd,
        user=request.user,
        stdin=stdin,
        timeout_s=request.timeout_s,
    )


async def _followed(sandbox: Sandbox, request: Request) -> int:
    stdin = request.stdin
    if stdin is None:
        stdin = request.attach_pid is None and streams.has_piped_input()
    limit_s = None if request.timeout_s is None else request.timeout_s + TIMEOUT_GRACE_S
    try:
        async with asyncio.timeout(limit_s), _process(sandbox, request, stdin=stdin) as process:
            return await _Foreground(process).run(stdin)
    except (DeadlineExceeded, TimeoutError):
        # The deadline of a Start is the process's, that of a Connect only the stream's.
        fate = "was killed" if request.attach_pid is None else "runs on"
        complain(f"the command did not end within {request.timeout_s:g} s and {fate}")
        return EXIT_TIMED_OUT


class _Foreground:
    """One process on our standard streams and signals."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._interrupts: list[signal.Signals] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stdin: bool) -> int:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: functools.partial(self._interrupt, number) for number in numbers}
        with streams.signals(handlers):
            if stdin:
                self._spawn(feed(self._process, _local_input()))
            try:
                ended = await self._copy_output()
            except (BrokenPipeError, asyncio.CancelledError, Conflict):
                # Nobody reads any more, or output was lost: locally the command would get SIGPIPE, so do not let it
                # run on unseen.
                await self._farewell()
                raise
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        # The daemon repeats the status here, except where it knows more (out of memory); why a program could not be
        # started it has written to stderr already.
        if ended.error and ended.error != ended.status and ended.exit_code not in (126, 127):
            complain(ended.error)
        return 128 + self._interrupts[0] if self._interrupts else ended.exit_code

    async def _copy_output(self) -> Ended:
        output = streams.LocalOutput()
        try:
            async for event in self._process.events():
                if isinstance(event, Ended):
                    return event
                await output.put(2 if isinstance(event, Stderr) else 1, event.data)
            raise AssertionError("events() ends with Ended or raises")
        finally:
            # Also when the stream broke: what arrived before is the user's.
            await output.flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    def _interrupt(self, number: signal.Signals) -> None:
        """First: SIGTERM (the daemon knows no SIGINT). Second: SIGKILL. Third: leave without waiting for its end."""
        self._interrupts.append(number)
        count = len(self._interrupts)
        if count == 1:
            self._spawn(self._signal(kill=False))
        elif count == 2:
            self._spawn(self._signal(kill=True))
        else:
            raise SystemExit(128 + number)

    async def _signal(self, *, kill: bool) -> None:
        try:
            await (self._process.kill() if kill else self._process.terminate())
        except NotFound:
            pass  # it ended meanwhile, and the event stream says so
        except ClientError as error:
            complain(f"the signal could not be sent: {error}")

    async def _farewell(self) -> None:
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await self._process.terminate()


async def _local_input() -> AsyncIterator[bytes]:
    descriptor = streams.input_descriptor()
    if descriptor is not None:
        async for piece in streams.pieces(descriptor):
            yield piece
    elif sys.stdin is not None:
        yield sys.stdin.buffer.read()


async def _explained(client: AenvClient, sandbox_id: str, error: ClientError) -> ClientError:
    """Why the connection broke, from the control plane: paused or gone is worth more than "reset by peer"."""
    try:
        info = await client.sandboxes.get(sandbox_id)
    except NotFound as gone:
        return NotFound(f"the sandbox ended while the command ran: {gone}", code=gone.code)
    except ClientError:
        return error
    if info.state == "paused":
        return ApiError(
            f"sandbox {sandbox_id} was paused while the command ran; "
            f"the command goes on after: aenv resume {sandbox_id}"
        )
    return error
