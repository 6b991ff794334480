"""An HTTP proxy on loopback that a test puts before a server: latency for each request, and faults at chosen ones.

    async with FaultProxy(server.host, server.port, latency_s=0.02) as proxy:
        proxy.fail(Status(503), at=3)                       # the third request from now on
        proxy.fail(Truncate(10), when=lambda r: r.method == "GET", times=2)
        ... use proxy.url ...
        assert proxy.requests[0].target == "/bucket/key"

`proxy_in_thread` does the same for tests and programs without an event loop of their own. One request per connection;
bodies are held in memory whole. Signatures that cover the Host header are passed through as they are.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

HEAD_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Request:
    """What the proxy saw of one request. `number` counts from 1."""

    number: int
    method: str
    target: str
    headers: dict[str, str]
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """The proxy answers itself; the server sees nothing."""

    status: int = 500
    body: bytes = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"


SLOW_DOWN = Status(503, b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce</Message></Error>")


@dataclass(frozen=True, slots=True)
class Truncate:
    """The server's answer, but only so many bytes of its body; the head still promises all of them."""

    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WrongEtag:
    """The server's answer with another ETag."""


@dataclass(frozen=True, slots=True)
class Flip:
    """The server's answer with one bit of its body changed."""

    at_byte: int = 0


@dataclass(frozen=True, slots=True)
class Stall:
    """The server does it, and the answer comes so much later (or never, once the client gave up)."""

    seconds: float = 3_600.0


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset: before the server sees the request, or after it carried it out."""

    carried_out: bool = False


Fault = Status | Truncate | WrongEtag | Flip | Stall | Reset


@dataclass(slots=True)
class _Rule:
    fault: Fault
    at: int | None
    when: Callable[[Request], bool] | None
    times: int

    def takes(self, request: Request) -> bool:
        if self.times == 0 or (self.at is not None and request.number != self.at):
            return False
        return self.when is None or self.when(request)


class FaultProxy:
    """The proxy, as an async context manager."""

    def __init__(self, host: str, port: int, *, latency_s: float = 0.0) -> None:
        self._upstream = (host, port)
        self.latency_s = latency_s
        self.requests: list[Request] = []
        self._rules: list[_Rule] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def fail(
        self, fault: Fault, *, at: int | None = None, when: Callable[[Request], bool] | None = None, times: int = 1
    ) -> None:
        """Plant a fault: at the `at`-th request from now on, or where `when` says so, at most `times` (-1: always)."""
        number = None if at is None else len(self.requests) + at
        self._rules.append(_Rule(fault, number, when, times))

    def heal(self) -> None:
        """Take all faults away."""
        self._rules.clear()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._one(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, headers)
        method, target, _ = first.split(" ", 2)
        request = Request(len(self.requests) + 1, method, target, headers, len(body))
        self.requests.append(request)
        fault = self._fault_for(request)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if isinstance(fault, Status):
            writer.write(_own_answer(fault))
        elif fault == Reset(carried_out=False):
            _reset(writer)
        else:
            answer = await self._forward(first, lines, body)
            if isinstance(fault, Stall):
                await asyncio.sleep(fault.seconds)
            if isinstance(fault, Reset):
                _reset(writer)
                return
            writer.write(_changed(answer, fault))
        await writer.drain()

    def _fault_for(self, request: Request) -> Fault | None:
        for rule in self._rules:
            if rule.takes(request):
                rule.times -= 1
                return rule.fault
        return None

    async def _forward(self, first: str, lines: list[str], body: bytes) -> bytes:
        """The server's whole answer, which says that the connection ends with it."""
        dropped = ("connection:", "expect:", "transfer-encoding:", "content-length:", "keep-alive:")
        kept = [line for line in lines if not line.lower().startswith(dropped)]
        head = "\r\n".join([first, *kept, f"Content-Length: {len(body)}", "Connection: close", "", ""])
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(head.encode("latin-1") + body)
            await writer.drain()
            answer = await reader.read(-1)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        head_bytes, separator, content = answer.partition(b"\r\n\r\n")
        headers = [line for line in head_bytes.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join([*headers, b"Connection: close"]) + separator + content


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            chunks.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return b"".join(chunks)
    return await reader.readexactly(int(headers.get("content-length", "0")))


def _own_answer(fault: Status) -> bytes:
    head = f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(fault.body)}\r\nConnection: close\r\n\r\n".encode() + fault.body


def _changed(answer: bytes, fault: Fault | None) -> bytes:
    head, separator, content = answer.partition(b"\r\n\r\n")
    if isinstance(fault, Truncate):
        return head + separator + content[: fault.body_bytes]
    if isinstance(fault, Flip) and len(content) > fault.at_byte:
        flipped = bytearray(content)
        flipped[fault.at_byte] ^= 1
        return head + separator + bytes(flipped)
    if isinstance(fault, WrongEtag):
        lines = head.split(b"\r\n")
        lines = [b'ETag: "0123456789abcdef"' if line.lower().startswith(b"etag:") else line for line in lines]
        return b"\r\n".join(lines) + separator + content
    return answer


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def proxy_in_thread(host: str, port: int, *, latency_s: float = 0.0) -> Iterator[FaultProxy]:
    """A proxy with an event loop of its own, for callers without one. `fail` may be called from any thread."""
    proxy = FaultProxy(host, port, latency_s=latency_s)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fault proxy", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result()
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(proxy.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
