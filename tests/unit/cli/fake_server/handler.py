"""Requests and answers as bytes: whole ones, streams of envelopes, and resets."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.unit.cli.fake_server.state import RpcError, State

RPC_STATUS = {"not_found": 404, "already_exists": 409, "invalid_argument": 400, "unauthenticated": 401}


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """Reads requests, which a subclass routes, and gives the means to answer them."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        self.state.connections.add(self.connection)
        try:
            super().handle()
        except (OSError, ValueError):
            pass  # the client went away
        finally:
            self.state.connections.discard(self.connection)

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def _serve(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = self._body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.state.requests.append((self.command, self.path, headers, body))
        if self.state.scripted:
            status, extra, data = self.state.scripted.pop(0)
            self.answer(status, data, extra)
            return
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        try:
            self.route(Request(self.command, url.path, query, headers, body))
        except RpcError as error:
            self.json(RPC_STATUS.get(error.code, 500), {"code": error.code, "message": str(error)})

    def route(self, request: Request) -> None:
        """Answer it."""
        raise NotImplementedError

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = bytearray()
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def error(self, status: int, message: str) -> None:
        self.json(status, {"code": status, "message": message})

    # Streams of envelopes

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def message(self, value: Any, flags: int = 0) -> None:
        data = json.dumps(value).encode()
        self.chunk(struct.pack(">BI", flags, len(data)) + data)

    def event(self, kind: str, value: Any) -> None:
        self.message({"event": {kind: value}})

    def end_stream(self, error: dict[str, str] | None = None) -> None:
        self.message({"error": error} if error else {}, 2)
        self.wfile.write(b"0\r\n\r\n")

    def reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        raise ConnectionAbortedError
