"""Processes in a sandbox: start, attach, feed, signal, and their events as an async iterator.

A process outlives the stream that started it; leaving the context of `start` or `attach` only detaches.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentenv.client.errors import BadRequest, Conflict, ConnectionLost, NotFound, ProtocolError
from agentenv.client.rpc import GuestChannel
from agentenv.client.values import Json, ProcessInfo, as_list, as_object, integer

# Base64 makes 175 kB of JSON of it, which passes any body limit between here and the daemon.
STDIN_CHUNK_BYTES: Final = 128 * 1024

# A login shell like the official SDKs use; images without bash get their own sh.
_RUN_IN_SHELL: Final = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$0"; fi; exec /bin/sh -l -c "$0"'
_INTERACTIVE_SHELL: Final = "if [ -x /bin/bash ]; then exec /bin/bash -i -l; fi; exec /bin/sh -i -l"

# How the daemon names the signal that ended a process; the number is needed for the exit code 128 + n.
SIGNAL_NUMBERS: Final = {
    "hangup": 1,
    "interrupt": 2,
    "quit": 3,
    "illegal instruction": 4,
    "trace/breakpoint trap": 5,
    "aborted": 6,
    "bus error": 7,
    "floating point exception": 8,
    "killed": 9,
    "user defined signal 1": 10,
    "segmentation fault": 11,
    "user defined signal 2": 12,
    "broken pipe": 13,
    "alarm clock": 14,
    "terminated": 15,
    "stack fault": 16,
    "cpu time limit exceeded": 24,
    "file size limit exceeded": 25,
    "bad system call": 31,
}


def shell_argv(command: str) -> list[str]:
    """The argument vector that runs `command` in the image's login shell (bash, else sh)."""
    return ["/bin/sh", "-c", _RUN_IN_SHELL, command]


def interactive_shell_argv() -> list[str]:
    """The argument vector of an interactive login shell (bash, else sh)."""
    return ["/bin/sh", "-c", _INTERACTIVE_SHELL]


@dataclass(frozen=True, slots=True)
class PtySize:
    """The size of a terminal in character cells."""

    cols: int
    rows: int

    def message(self) -> dict[str, Any]:
        """The form that the daemon takes."""
        return {"size": {"cols": self.cols, "rows": self.rows}}


@dataclass(frozen=True, slots=True)
class Stdout:
    """Bytes that the process wrote to its standard output."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Stderr:
    """Bytes that the process wrote to its standard error."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PtyOutput:
    """Bytes that the process wrote to its terminal."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The process has ended; the last event. `exit_code` is 128 + n after signal n, as in a shell."""

    exit_code: int
    status: str
    error: str | None


ProcessEvent = Stdout | Stderr | PtyOutput | Ended


class Process:
    """One process with its event stream attached."""

    def __init__(self, channel: GuestChannel, pid: int, messages: AsyncGenerator[Json, None]) -> None:
        self._channel = channel
        self._messages = messages
        self.pid = pid

    async def events(self) -> AsyncIterator[ProcessEvent]:
        """Output in order, then exactly one `Ended`.

        Raises `DeadlineExceeded` when the timeout ran out, `ConnectionLost` when the stream is cut.
        """
        ended: Ended | None = None
        async for message in self._messages:
            event = _event_of(message)
            if isinstance(event, Ended):
                ended = event
            elif event is not None:
                yield event
        if ended is None:
            raise ConnectionLost(f"the stream of process {self.pid} ended without saying how the process ended")
        yield ended

    async def send_stdin(self, data: bytes) -> None:
        """Write to its standard input; waits as long as it does not read. Raises `NotFound` when it is gone."""
        await self._send("stdin", data)

    async def send_pty(self, data: bytes) -> None:
        """Type on the process's terminal. Raises `NotFound` when it is gone."""
        await self._send("pty", data)

    async def _send(self, where: str, data: bytes) -> None:
        for start in range(0, len(data), STDIN_CHUNK_BYTES):
            piece = base64.b64encode(data[start : start + STDIN_CHUNK_BYTES]).decode()
            # No read limit: a full pipe is the process's business, and the event stream notices a dead sandbox.
            await self._channel.call(
                "process.Process/SendInput",
                {"process": {"pid": self.pid}, "input": {where: piece}},
                read_timeout_s=None,
            )

    async def close_stdin(self) -> None:
        """Give the process an end of file. Raises `NotFound` when it is gone."""
        await self._channel.call("process.Process/CloseStdin", {"process": {"pid": self.pid}})

    async def resize(self, size: PtySize) -> None:
        """Tell the process's terminal its new size."""
        await self._channel.call("process.Process/Update", {"process": {"pid": self.pid}, "pty": size.message()})

    async def terminate(self) -> None:
        """Send SIGTERM. Raises `NotFound` when it is gone."""
        await send_signal(self._channel, self.pid, "SIGNAL_SIGTERM")

    async def kill(self) -> None:
        """Send SIGKILL. Raises `NotFound` when it is gone."""
        await send_signal(self._channel, self.pid, "SIGNAL_SIGKILL")


@contextlib.asynccontextmanager
async def start(
    channel: GuestChannel,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    stdin: bool = False,
    pty: PtySize | None = None,
    tag: str | None = None,
    timeout_s: float | None = None,
) -> AsyncIterator[Process]:
    """Start `argv` (no shell in between) and attach to it.

    `stdin` False gives it /dev/null. After `timeout_s` the daemon kills it. Raises `BadRequest` for a missing `cwd`,
    `Unauthorized` for an unknown user.
    """
    config: dict[str, Any] = {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(env or {})}
    if cwd is not None:
        config["cwd"] = cwd
    message: dict[str, Any] = {"process": config, "stdin": stdin}
    if pty is not None:
        message["pty"] = pty.message()
    if tag is not None:
        message["tag"] = tag
    async with channel.stream("process.Process/Start", message, user=user, timeout_s=timeout_s) as messages:
        yield Process(channel, await _started(messages), messages)


@contextlib.asynccontextmanager
async def attach(channel: GuestChannel, pid: int, *, timeout_s: float | None = None) -> AsyncIterator[Process]:
    """Follow a process that runs already. Raises `NotFound` when there is none with this pid."""
    message = {"process": {"pid": pid}}
    async with channel.stream("process.Process/Connect", message, timeout_s=timeout_s) as messages:
        yield Process(channel, await _started(messages), messages)


async def send_signal(channel: GuestChannel, pid: int, name: str) -> None:
    """Send SIGNAL_SIGTERM or SIGNAL_SIGKILL, the two that the daemon knows. Raises `NotFound`."""
    await channel.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": name})


async def list_processes(channel: GuestChannel) -> list[ProcessInfo]:
    """The processes that the daemon started and that still run."""
    answer = await channel.call("process.Process/List", {})
    return [ProcessInfo.of(item) for item in as_list(answer.get("processes", []), "processes")]


async def feed(process: Process, pieces: AsyncIterator[bytes]) -> None:
    """Send all of `pieces`, then the end of file. A process that ended before its input did is no error."""
    try:
        async for piece in pieces:
            await process.send_stdin(piece)
        await process.close_stdin()
    except (NotFound, Conflict, BadRequest):
        # Three answers for "nobody reads this any more": gone, ending, or its standard input is closed.
        return


async def _started(messages: AsyncGenerator[Json, None]) -> int:
    """The pid of the first event, which is always `start` (keepalives aside)."""
    async for message in messages:
        event = as_object(message.get("event", {}), "event")
        if "start" in event:
            return integer(as_object(event["start"], "start event"), "pid")
        if "keepalive" not in event:
            raise ProtocolError("the process's stream does not begin with its start event")
    raise ProtocolError("the process's stream ended before its start event")


def _event_of(message: Json) -> ProcessEvent | None:
    event = as_object(message.get("event", {}), "event")
    if "data" in event:
        data = as_object(event["data"], "data event")
        for name, kind in (("stdout", Stdout), ("stderr", Stderr), ("pty", PtyOutput)):
            if name in data:
                return kind(_decoded(data[name]))
        return None
    if "end" in event:
        return _ended(as_object(event["end"], "end event"))
    # keepalive, and whatever a newer daemon may add
    return None


def _decoded(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError("output that is not base64") from error


def _ended(data: Json) -> Ended:
    status = str(data.get("status", ""))
    code = integer(data, "exitCode", 0)
    if status.startswith("signal: "):
        # The daemon reports -1 here, as Go does; the status word is the protocol's only place for the signal.
        name = status.removeprefix("signal: ").removesuffix(" (core dumped)")
        number = SIGNAL_NUMBERS.get(name)
        code = 128 + number if number is not None else code if code > 0 else 255
    error = data.get("error")
    return Ended(exit_code=code, status=status, error=str(error) if error else None)
