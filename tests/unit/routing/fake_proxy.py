"""A proxy without traffic: the control protocol alone, on a Unix socket, with what it was sent."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass
class FakeProxy:
    """Keeps the documented meaning of each call, so that it passes the same tests as the real one."""

    socket: Path
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    is_stopping: bool = False
    raw_answer: bytes | None = None
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeProxy:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        line = head.split(" HTTP/")[0]
        self.requests.append((line, body))
        writer.write(self.raw_answer or self._answer(line, body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _answer(self, line: str, body: bytes) -> bytes:
        status, answer = "200 OK", dict[str, Any]()
        match line:
            case "POST /withdraw" | "PUT /live" if self._is_request(line, body):
                answer = {"aborted": 0}
            case "POST /withdraw" | "PUT /live":
                status, answer = "400 Bad Request", {"code": 400, "message": "unreadable body"}
            case "GET /health":
                answer = {"pid": 7, "listen": "127.0.0.1:8000", "connections": 0, "generations": []}
            case "POST /shutdown":
                self.is_stopping = True
        content = json.dumps(answer).encode()
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content

    @staticmethod
    def _is_request(line: str, body: bytes) -> bool:
        # The real proxy takes unsigned numbers only.
        numbers = json.loads(body)["generations"]
        return all(isinstance(number, int) and number >= 0 for number in numbers)
