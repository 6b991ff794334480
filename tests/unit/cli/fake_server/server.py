"""The server itself, and which part of it a request is for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.unit.cli.fake_server.control import Control
from tests.unit.cli.fake_server.files import Files
from tests.unit.cli.fake_server.handler import Handler, Request
from tests.unit.cli.fake_server.processes import Processes
from tests.unit.cli.fake_server.state import State


class FakeServer:
    """Runs on a free port of the loopback until `close`; kills what it started."""

    def __init__(self, root: Path) -> None:
        self.state = State(root)
        handler = type("BoundHandler", (_Router,), {"state": self.state})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        for running in list(self.state.running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def drop_streams(self) -> None:
        """Reset every connection, as the proxy does when a sandbox goes away."""
        for connection in list(self.state.connections):
            # Those that end by themselves just now are as good as reset.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RD)
                os.close(connection.detach())

    def bodies(self, method: str, path: str) -> list[Any]:
        """The JSON bodies of the requests to this path."""
        found = [body for m, p, _, body in self.state.requests if m == method and p.partition("?")[0] == path]
        return [json.loads(body) if body else None for body in found]


class _Router(Handler):
    def route(self, request: Request) -> None:
        if "e2b-sandbox-id" in request.headers:
            self._to_guest(request)
        else:
            Control(self, request).serve()

    def _to_guest(self, request: Request) -> None:
        """To the daemon of a sandbox, if it runs and the token is right."""
        path, sandbox_id = request.path, request.headers["e2b-sandbox-id"]
        box = self.state.sandboxes.get(sandbox_id)
        if box is None or box["state"] != "running":
            self.json(502, {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502})
        elif request.headers.get("x-access-token") != box["envdAccessToken"] and path != "/health":
            self.json(401, {"code": 401, "message": "unauthorized access"})
        elif path == "/health":
            self.answer(204)
        elif path == "/files":
            Files(self).transfer(request.query, request.body)
        else:
            service = Files(self) if path.startswith("/filesystem.") else Processes(self, request.headers)
            call = getattr(service, path.rpartition("/")[2])
            call(request.body if path.endswith(("/Start", "/Connect")) else json.loads(request.body))
