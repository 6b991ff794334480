"""`Sandbox`: the handle of one running sandbox, over which commands run and files move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from agentenv.client import process as processes
from agentenv.client.errors import CommandTimedOut, DeadlineExceeded, SandboxUnreachable
from agentenv.client.files import Files
from agentenv.client.process import Ended, Process, PtySize, Stderr, Stdout
from agentenv.client.rpc import GuestChannel
from agentenv.client.transport import Transport
from agentenv.client.values import Json, ProcessInfo

OUTPUT_BYTES_MAX: Final = 16 * 1024 * 1024
HEALTH_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a command left. `truncated` says that output beyond the limit was dropped."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool


class Sandbox:
    """A sandbox to work in. Holds no connection; many calls may run at once."""

    def __init__(
        self, transport: Transport, sandbox_url: str, sandbox_id: str, access_token: str | None, raw: Json | None = None
    ) -> None:
        self.sandbox_id = sandbox_id
        self.raw: Json = {} if raw is None else raw
        self._channel = GuestChannel(transport, sandbox_url, sandbox_id, access_token)
        self.files = Files(self._channel)

    async def health(self) -> bool:
        """Whether the guest daemon answers; False when the proxy says that the sandbox does not run."""
        try:
            await self._channel.transport.request(
                "GET",
                f"{self._channel.base_url}/health",
                headers=self._channel.headers(),
                expect=range(200, 300),
                idempotent=True,
                read_timeout_s=HEALTH_TIMEOUT_S,
            )
        except SandboxUnreachable:
            return False
        return True

    def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        pty: PtySize | None = None,
        tag: str | None = None,
        timeout_s: float | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a process: text through the image's login shell, a sequence as an argument vector without a shell.

        See `process.start` for the rest. Leaving the context detaches and lets the process run on.
        """
        argv = processes.shell_argv(command) if isinstance(command, str) else list(command)
        return processes.start(
            self._channel, argv, env=env, cwd=cwd, user=user, stdin=stdin, pty=pty, tag=tag, timeout_s=timeout_s
        )

    def attach(self, pid: int, *, timeout_s: float | None = None) -> AbstractAsyncContextManager[Process]:
        """Follow a process that runs already. Raises `NotFound`."""
        return processes.attach(self._channel, pid, timeout_s=timeout_s)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
    ) -> RunResult:
        """Run a command to its end and collect its output, up to `output_bytes_max` per stream.

        A non-zero exit code is a result, not an error. Raises `CommandTimedOut` with the output up to then.
        """
        stdout, stderr = _Collector(output_bytes_max), _Collector(output_bytes_max)
        starting = self.start(command, env=env, cwd=cwd, user=user, stdin=stdin is not None, timeout_s=timeout_s)
        try:
            async with starting as running:
                ended = await _collect(running, stdin, stdout, stderr)
        except DeadlineExceeded as error:
            raise CommandTimedOut(
                f"the command did not end within {timeout_s} s and was killed",
                stdout=bytes(stdout.data),
                stderr=bytes(stderr.data),
            ) from error
        return RunResult(
            exit_code=ended.exit_code,
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            truncated=stdout.is_full or stderr.is_full,
        )

    async def list_processes(self) -> list[ProcessInfo]:
        """The processes started over the API that still run."""
        return await processes.list_processes(self._channel)

    async def terminate(self, pid: int) -> None:
        """Send SIGTERM to a process. Raises `NotFound`."""
        await processes.send_signal(self._channel, pid, "SIGNAL_SIGTERM")

    async def kill_process(self, pid: int) -> None:
        """Send SIGKILL to a process. Raises `NotFound`."""
        await processes.send_signal(self._channel, pid, "SIGNAL_SIGKILL")

    def __repr__(self) -> str:
        return f"Sandbox({self.sandbox_id!r})"


class _Collector:
    """Keeps the first `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.data = bytearray()
        self.is_full = False

    def add(self, piece: bytes) -> None:
        room = self._limit - len(self.data)
        self.data += piece[:room]
        self.is_full = self.is_full or len(piece) > room


async def _collect(running: Process, stdin: bytes | None, stdout: _Collector, stderr: _Collector) -> Ended:
    """Feed the input and read the output at the same time: a process that answers early would block on a full pipe."""
    feeder = None if stdin is None else asyncio.create_task(processes.feed(running, _once(stdin)))
    try:
        async for event in running.events():
            if isinstance(event, Stdout):
                stdout.add(event.data)
            elif isinstance(event, Stderr):
                stderr.add(event.data)
            elif isinstance(event, Ended):
                return event
    finally:
        if feeder is not None:
            feeder.cancel()
            # Its own failure is of no interest: whatever broke the input breaks the event stream too.
            await asyncio.gather(feeder, return_exceptions=True)
    raise AssertionError("events() ends with Ended or raises")


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
