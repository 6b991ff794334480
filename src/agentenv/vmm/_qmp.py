"""A QMP client: JSON lines over a Unix socket, every command with a deadline.

Owns one connection. Does not know what the commands mean. Descriptors travel with a command (SCM_RIGHTS), which is why
this works on a plain non-blocking socket: neither asyncio's nor uvloop's transports can send them.

Losing the connection is `ConnectionLost`, a private error: only the owner knows whether the process is dead
(`VmmGone`) or merely deaf (`VmmTimeout`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import VmmError, VmmTimeout

# The longest answer that is ever asked for is a few kilobytes; more means that this is not a QMP peer.
LINE_BYTES_MAX = 1 << 20
_RECEIVE_BYTES = 1 << 16
_CONNECT_PAUSE_S = 0.001

EventHandler = Callable[[str, Mapping[str, Any]], None]


class ConnectionLost(Exception):
    """The peer closed the connection, or it could not be made."""


class QmpClient:
    """One negotiated connection. Commands may be issued concurrently; the peer runs them in order of sending."""

    def __init__(self, connection: socket.socket, on_event: EventHandler) -> None:
        self._socket = connection
        self._on_event = on_event
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 1
        self._lost: str | None = None
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def connect(cls, path: Path, on_event: EventHandler, timeout_s: float) -> QmpClient:
        """Connect and negotiate; the socket may appear only later, within the same deadline.

        Raises `VmmTimeout` when there is no greeting in time and `ConnectionLost` when the peer hangs up first.
        """
        client: QmpClient | None = None
        try:
            async with asyncio.timeout(timeout_s):
                client = cls(await _connected_socket(path), on_event)
                # Sent before the greeting arrives: the peer reads it when it gets there, and a round trip is saved.
                await client.start("qmp_capabilities")
                return client
        except BaseException as error:
            if client is not None:
                await client.close()
            if isinstance(error, TimeoutError):
                raise VmmTimeout(f"no QMP greeting on {path} within {timeout_s:g} s") from error
            raise

    def start(
        self, command: str, arguments: Mapping[str, Any] | None = None, fd: int | None = None
    ) -> asyncio.Future[Any]:
        """Send a command, with a copy of `fd`; the result is its answer. Never waits.

        The future raises `VmmError` (refused) or `ConnectionLost`; cancelling it ignores the answer.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            future.set_exception(ConnectionLost(self._lost))
            return future
        number, self._next_id = self._next_id, self._next_id + 1
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        line = json.dumps({"execute": command, "arguments": dict(arguments or {}), "id": number}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._socket, [line], [] if fd is None else [fd])
        except OSError as error:
            self._lose(str(error))
            return future
        if sent != len(line):
            # The peer has not read for two hundred kilobytes of small commands: it will not recover by waiting.
            self._lose("the peer does not read its commands")
        return future

    async def execute(
        self, command: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float, fd: int | None = None
    ) -> Any:
        """Send a command and wait for its answer. Raises `VmmTimeout`, `VmmError` or `ConnectionLost`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.start(command, arguments, fd)
        except TimeoutError as error:
            raise VmmTimeout(f"QMP {command} was not answered within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Hang up; waiting commands end with `ConnectionLost`."""
        self._lose("closed by this side")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        buffered = b""
        try:
            while received := await loop.sock_recv(self._socket, _RECEIVE_BYTES):
                *lines, buffered = (buffered + received).split(b"\n")
                for line in lines:
                    self._dispatch(json.loads(line))
                if len(buffered) > LINE_BYTES_MAX:
                    self._lose(f"a QMP line is longer than {LINE_BYTES_MAX} bytes")
                    return
            self._lose("the VMM closed its control socket")
        except (OSError, ValueError) as error:
            self._lose(str(error))
        finally:
            self._socket.close()

    def _dispatch(self, message: Mapping[str, Any]) -> None:
        if "event" in message:
            self._on_event(message["event"], message.get("data", {}))
        elif "QMP" not in message:  # the greeting itself says nothing that is needed
            future = self._waiting.pop(message.get("id", 0), None)
            if future is None or future.done():
                return  # nobody waits any more: its deadline passed or it was cancelled
            if "error" in message:
                future.set_exception(VmmError(f"QEMU refused: {message['error'].get('desc', 'no reason given')}"))
            else:
                future.set_result(message.get("return"))

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ConnectionLost(reason))
                future.exception()  # seen: a future that nobody awaits must not be reported at collection
        self._waiting.clear()


async def _connected_socket(path: Path) -> socket.socket:
    """Wait for the socket file of a process that is starting; polling a stat for some milliseconds is cheap."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                connection.connect(str(path))
                return connection
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                await asyncio.sleep(_CONNECT_PAUSE_S)
    except BaseException:
        connection.close()
        raise
