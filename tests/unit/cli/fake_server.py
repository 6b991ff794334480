"""A server for tests of the client and the CLI: the control plane in memory, and a guest daemon that runs real local
processes and keeps files in a scratch directory.

It speaks the wire as spec'd (Connect envelopes, chunked streams, error bodies) and breaks it on demand: a command whose
first word is `fault:...` resets the stream, cuts a frame, omits the end frame, and so on. Programs named in
`missing_programs` do not exist for it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import termios
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

API_KEY = "e2b_" + "ab" * 20
GO_SIGNALS = {1: "hangup", 2: "interrupt", 9: "killed", 11: "segmentation fault", 15: "terminated"}


class RpcError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


RPC_STATUS = {"not_found": 404, "already_exists": 409, "invalid_argument": 400, "unauthenticated": 401}


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    argv: list[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)
    terminal: int | None = None
    input_seen: bytearray = field(default_factory=bytearray)

    def put(self, event: dict[str, Any]) -> None:
        with self.news:
            self.events.append(event)
            self.news.notify_all()


@dataclass
class State:
    root: Path
    sandboxes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pause_safety: dict[str, str] = field(default_factory=dict)
    tombstones: dict[str, dict[str, Any]] = field(default_factory=dict)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    templates: list[dict[str, Any]] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    # Answers given before the real ones: (status, headers, body).
    scripted: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    programs: dict[str, str] = field(default_factory=dict)
    missing_programs: set[str] = field(default_factory=set)
    page_items: int = 100
    signals: list[tuple[int, str]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    # Uploads store this many bytes fewer than were sent.
    upload_loss_bytes: int = 0
    counter: int = 0
    connections: set[socket.socket] = field(default_factory=set)

    def add(self, **fields: Any) -> str:
        self.counter += 1
        sandbox_id = f"i{self.counter:020d}"
        self.sandboxes[sandbox_id] = {
            "sandboxID": sandbox_id,
            "templateID": "base",
            "alias": "base",
            "clientID": "c",
            "state": "running",
            "cpuCount": 2,
            "memoryMB": 1024,
            "diskSizeMB": 2048,
            "startedAt": "2026-01-01T00:00:00Z",
            "endAt": "2026-01-01T01:00:00Z",
            "metadata": {},
            "envdVersion": "0.6.13",
            "envdAccessToken": f"token-{sandbox_id}",
            "lifecycle": {"autoResume": False, "onTimeout": "pause"},
            **fields,
        }
        return sandbox_id


class FakeServer:
    """Runs on a free port of the loopback until `close`; kills what it started."""

    def __init__(self, root: Path) -> None:
        self.state = State(root)
        handler = type("Handler", (_Handler,), {"state": self.state})
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


class _Handler(BaseHTTPRequestHandler):
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
            self._answer(status, data, extra)
            return
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        try:
            if "e2b-sandbox-id" in headers:
                _Envd(self, headers).serve(url.path, query, body)
            else:
                self._control(url.path, query, body, headers)
        except RpcError as error:
            self._json(RPC_STATUS.get(error.code, 500), {"code": error.code, "message": str(error)})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = bytearray()
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, message: str) -> None:
        self._json(status, {"code": status, "message": message})

    # Control plane

    def _control(self, path: str, query: dict[str, str], body: bytes, headers: dict[str, str]) -> None:
        if headers.get("x-api-key") != API_KEY:
            self._error(401, "invalid API key")
            return
        data = json.loads(body) if body else {}
        parts = [unquote(part) for part in path.strip("/").split("/")]
        match (self.command, *parts):
            case ("POST", "v2", "sandboxes"):
                if data["templateID"] == "missing":
                    self._error(404, "template 'missing' not found")
                    return
                sandbox_id = self.state.add(templateID=data["templateID"], metadata=data.get("metadata", {}))
                self._json(201, self.state.sandboxes[sandbox_id])
            case ("GET", "v2", "sandboxes"):
                wanted = query.get("state", "running,paused").split(",")
                self._page([box for box in self.state.sandboxes.values() if box["state"] in wanted], query)
            case ("GET", "snapshots"):
                self._page(self.state.snapshots, query)
            case ("GET", "templates"):
                self._json(200, self.state.templates)
            case ("GET", "aenv", "node"):
                self._json(200, {"driver": "qemu", "sandboxes": {"running": len(self.state.sandboxes)}})
            case ("GET", "aenv", "sandboxes", sandbox_id) if sandbox_id in self.state.sandboxes:
                self._json(200, {"sandboxID": sandbox_id, "pauseSafety": self.state.pause_safety.get(sandbox_id)})
            case ("GET", "aenv", "tombstones", sandbox_id) if sandbox_id in self.state.tombstones:
                self._json(200, self.state.tombstones[sandbox_id])
            case ("DELETE", "templates", reference):
                known = [item for item in self.state.snapshots if item["snapshotID"] == reference]
                if not known:
                    self._error(404, f"snapshot {reference!r} not found")
                    return
                self.state.snapshots.remove(known[0])
                self._answer(204)
            case (_, "sandboxes", sandbox_id, *action) | (_, "v2", "sandboxes", sandbox_id, *action):
                self._sandbox(sandbox_id, "/".join(action), data)
            case _:
                self._error(404, f"no route {path}")

    def _page(self, items: list[dict[str, Any]], query: dict[str, str]) -> None:
        start = int(query.get("nextToken", "0"))
        end = start + min(self.state.page_items, int(query.get("limit", "100")))
        headers = {"X-Next-Token": str(end)} if end < len(items) else {}
        self._json(200, items[start:end], headers)

    def _sandbox(self, sandbox_id: str, action: str, data: dict[str, Any]) -> None:
        box = self.state.sandboxes.get(sandbox_id)
        if box is None:
            self._error(404, f"sandbox {sandbox_id} not found: deleted")
            return
        match (self.command, action):
            case ("GET", ""):
                self._json(200, box)
            case ("DELETE", ""):
                del self.state.sandboxes[sandbox_id]
                self._answer(204)
            case ("POST", "pause"):
                if box["state"] == "paused":
                    self._error(409, f"sandbox {sandbox_id} is paused already")
                    return
                box["state"] = "paused"
                self._answer(204)
            case ("POST", "connect"):
                was_paused = box["state"] == "paused"
                box["state"] = "running"
                self._json(201 if was_paused else 200, box)
            case ("POST", "timeout"):
                self._answer(204)
            case ("POST", "fork"):
                count = data["count"]
                children: list[dict[str, Any]] = [
                    {"sandbox": self.state.sandboxes[self.state.add()]} for _ in range(min(count, 3))
                ]
                children += [{"error": {"code": 429, "message": "no room"}} for _ in range(count - len(children))]
                self._json(201, children)
            case ("POST", "snapshots"):
                name = data.get("name")
                snapshot = {"snapshotID": f"team/{name}:default" if name else "sabc:default", "names": [name or ""]}
                self.state.snapshots.append(snapshot)
                self._json(201, snapshot)
            case _:
                self._error(404, f"no route {action}")


class _Envd:
    """One request to the guest daemon."""

    def __init__(self, handler: _Handler, headers: dict[str, str]) -> None:
        self.http = handler
        self.state = handler.state
        self.headers = headers

    def serve(self, path: str, query: dict[str, str], body: bytes) -> None:
        sandbox_id = self.headers["e2b-sandbox-id"]
        box = self.state.sandboxes.get(sandbox_id)
        if box is None or box["state"] != "running":
            message = "The sandbox was not found"
            self.http._json(502, {"sandboxId": sandbox_id, "message": message, "code": 502})
        elif self.headers.get("x-access-token") != box["envdAccessToken"] and path != "/health":
            self.http._json(401, {"code": 401, "message": "unauthorized access"})
        elif path == "/health":
            self.http._answer(204)
        elif path == "/files":
            self._files(query, body)
        else:
            call = getattr(self, "_" + path.rpartition("/")[2])
            call(body if path.endswith(("/Start", "/Connect")) else json.loads(body))

    # Files: the guest's root directory is a scratch directory, its home is /home

    def _local(self, path: str) -> Path:
        absolute = path if path.startswith("/") else f"/home/{path.removeprefix('~').lstrip('/')}"
        return self.state.root / os.path.normpath(absolute).lstrip("/")

    def _guest(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.state.root)).removeprefix(".")

    def _entry(self, path: Path) -> dict[str, Any]:
        try:
            status = path.stat()
        except OSError as error:
            raise RpcError("not_found", f"path '{self._guest(path)}' does not exist") from error
        entry = {
            "name": path.name,
            "path": self._guest(path),
            "type": "FILE_TYPE_DIRECTORY" if path.is_dir() else "FILE_TYPE_FILE",
            "size": str(status.st_size),
            "mode": status.st_mode & 0o777,
            "permissions": "-rw-r--r--",
            "owner": "user",
            "group": "user",
            "modifiedTime": "2026-01-01T00:00:00Z",
        }
        return {**entry, "symlinkTarget": str(path.resolve())} if path.is_symlink() else entry

    def _files(self, query: dict[str, str], body: bytes) -> None:
        path = self._local(query["path"])
        if self.http.command == "POST":
            if path.is_dir():
                self.http._json(400, {"code": 400, "message": f"path is a directory: {query['path']}"})
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body[: len(body) - self.state.upload_loss_bytes])
            path.chmod(0o644)
            self.http._json(200, [{"name": path.name, "path": self._guest(path), "type": "file"}])
        elif not path.is_file():
            status = 400 if path.is_dir() else 404
            self.http._json(status, {"code": status, "message": f"path '{query['path']}' does not exist"})
        elif path.name == "fault-short":
            self.http.send_response(200)
            self.http.send_header("Content-Length", "1000")
            self.http.end_headers()
            self.http.wfile.write(b"half")
            self._reset()
        else:
            self.http._answer(200, path.read_bytes())

    def _Stat(self, data: dict[str, Any]) -> None:  # noqa: N802
        self.http._json(200, {"entry": self._entry(self._local(data["path"]))})

    def _ListDir(self, data: dict[str, Any]) -> None:  # noqa: N802
        path = self._local(data["path"])
        self.http._json(200, {"entries": [self._entry(item) for item in sorted(path.iterdir())]})

    def _MakeDir(self, data: dict[str, Any]) -> None:  # noqa: N802
        path = self._local(data["path"])
        if path.is_dir():
            raise RpcError("already_exists", "directory exists")
        if path.exists():
            raise RpcError("invalid_argument", "a file is in the way")
        path.mkdir(parents=True)
        self.http._json(200, {"entry": self._entry(path)})

    def _Move(self, data: dict[str, Any]) -> None:  # noqa: N802
        target = self._local(data["destination"])
        self._local(data["source"]).rename(target)
        self.http._json(200, {"entry": self._entry(target)})

    def _Remove(self, data: dict[str, Any]) -> None:  # noqa: N802
        path = self._local(data["path"])
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.http._json(200, {})

    # Processes

    def _begin_stream(self) -> None:
        self.http.send_response(200)
        self.http.send_header("Content-Type", "application/connect+json")
        self.http.send_header("Transfer-Encoding", "chunked")
        self.http.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.http.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _message(self, value: Any, flags: int = 0) -> None:
        data = json.dumps(value).encode()
        self._chunk(struct.pack(">BI", flags, len(data)) + data)

    def _event(self, kind: str, value: Any) -> None:
        self._message({"event": {kind: value}})

    def _end_stream(self, error: dict[str, str] | None = None) -> None:
        self._message({"error": error} if error else {}, 2)
        self.http.wfile.write(b"0\r\n\r\n")

    def _reset(self) -> None:
        self.http.wfile.flush()
        self.http.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.http.close_connection = True
        self.http.connection.close()
        raise ConnectionAbortedError

    def _fault(self, kind: str) -> None:
        self._begin_stream()
        if kind == "no-start":
            self._event("data", {"stdout": ""})
            return self._end_stream()
        self._event("start", {"pid": 1})
        self._event("data", {"stdout": base64.b64encode(b"before\n").decode()})
        match kind:
            case "reset":
                self._reset()
            case "paused":
                self.state.sandboxes[self.headers["e2b-sandbox-id"]]["state"] = "paused"
                self._reset()
            case "killed":
                del self.state.sandboxes[self.headers["e2b-sandbox-id"]]
                self._reset()
            case "half":
                self._chunk(struct.pack(">BI", 0, 100) + b'{"event"')
                self.http.wfile.write(b"0\r\n\r\n")
            case "no-end-frame":
                self.http.wfile.write(b"0\r\n\r\n")
            case "no-end-event":
                self._end_stream()
            case "compressed":
                self._message({}, 1)
            case "huge":
                self._chunk(struct.pack(">BI", 0, 1 << 31))
            case "not-json":
                self._chunk(struct.pack(">BI", 0, 3) + b"{{{")
            case _:
                self._end_stream({"code": kind, "message": f"it is {kind}"})
        return None

    def _Start(self, body: bytes) -> None:  # noqa: N802
        data = json.loads(body[5:])
        config = data["process"]
        argv = [config["cmd"], *config["args"]]
        if argv[0].startswith("fault:"):
            return self._fault(argv[0].removeprefix("fault:"))
        cwd = self._local(config.get("cwd", "/home"))
        self._begin_stream()
        if not cwd.is_dir():
            return self._end_stream({"code": "invalid_argument", "message": f"cwd '{config['cwd']}' does not exist"})
        env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GUEST_ROOT": str(self.state.root), **config["envs"]}
        if argv[0] in self.state.missing_programs or shutil.which(argv[0]) is None:
            self._event("start", {"pid": 1})
            self._event("data", {"stderr": base64.b64encode(f"{argv[0]}: not found\n".encode()).decode()})
            self._event("end", {"exitCode": 127, "exited": True, "status": "exit status 127", "error": "not found"})
            return self._end_stream()
        if argv[0] in ("tar", "chmod"):
            # Programs that take guest paths: from the scratch root, with paths relative to it.
            program = self.state.programs.get(argv[0], argv[0])
            argv = [program, *(str(self._local(a)) if a.startswith("/") else a for a in argv[1:])]
        running = self._spawn(argv, data, cwd, env)
        self._follow(running, float(self.headers.get("connect-timeout-ms", "inf")) / 1000)
        return None

    def _spawn(self, argv: list[str], data: dict[str, Any], cwd: Path, env: dict[str, str]) -> Running:
        if "pty" in data:
            parent, child = pty.openpty()
            size = data["pty"]["size"]
            fcntl.ioctl(parent, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))
            self.state.sizes.append((size["cols"], size["rows"]))
            process = subprocess.Popen(
                # A controlling terminal, so that ctrl-C means something: the first terminal a session leader opens.
                ["env", "--default-signal", "/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(child), *argv],
                start_new_session=True, cwd=cwd, env=env, stdin=child, stdout=child, stderr=child,
            )  # fmt: skip
            running = Running(process, argv, terminal=parent)
            self.state.running[process.pid] = running
            os.close(child)
            threading.Thread(target=self._read_terminal, args=(running,)).start()
            return running
        stdin = subprocess.PIPE if data.get("stdin", True) else subprocess.DEVNULL
        process = subprocess.Popen(
            argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=env, start_new_session=True
        )
        running = Running(process, argv)
        self.state.running[process.pid] = running
        threading.Thread(target=self._read_pipes, args=(running,)).start()
        return running

    def _read_pipes(self, running: Running) -> None:
        def pump(name: str, file: Any) -> None:
            while piece := os.read(file.fileno(), 32 * 1024):
                running.put({"data": {name: base64.b64encode(piece).decode()}})

        process = running.process
        threads = [threading.Thread(target=pump, args=("stdout", process.stdout))]
        threads += [threading.Thread(target=pump, args=("stderr", process.stderr))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        process.wait()
        for file in (process.stdin, process.stdout, process.stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
        self.state.running.pop(process.pid, None)
        running.put(_end_event(process.returncode))

    def _read_terminal(self, running: Running) -> None:
        assert running.terminal is not None
        while True:
            try:
                piece = os.read(running.terminal, 32 * 1024)
            except OSError:
                break
            running.put({"data": {"pty": base64.b64encode(piece).decode()}})
        running.process.wait()
        os.close(running.terminal)
        running.terminal = None
        self.state.running.pop(running.process.pid, None)
        running.put(_end_event(running.process.returncode))

    def _follow(self, running: Running, timeout_s: float) -> None:
        self._event("start", {"pid": running.process.pid})
        position = 0
        while True:
            with running.news:
                arrived = running.news.wait_for(
                    lambda: len(running.events) > position,  # noqa: B023 - called before the next round
                    None if timeout_s == float("inf") else timeout_s,
                )
            if not arrived:
                os.killpg(running.process.pid, signal.SIGKILL)
                return self._end_stream({"code": "deadline_exceeded", "message": "timed out"})
            event = running.events[position]
            position += 1
            self._message({"event": event})
            if "end" in event:
                return self._end_stream()

    def _find(self, data: dict[str, Any]) -> Running:
        running = self.state.running.get(data["process"]["pid"])
        if running is None:
            raise RpcError("not_found", f"process with pid {data['process']['pid']} not found")
        return running

    def _Connect(self, body: bytes) -> None:  # noqa: N802
        data = json.loads(body[5:])
        self._begin_stream()
        try:
            running = self._find(data)
        except RpcError as error:
            return self._end_stream({"code": error.code, "message": str(error)})
        return self._follow(running, float("inf"))

    def _List(self, data: dict[str, Any]) -> None:  # noqa: N802
        items = [
            {"pid": pid, "config": {"cmd": item.argv[0], "args": item.argv[1:]}}
            for pid, item in self.state.running.items()
        ]
        self.http._json(200, {"processes": items})

    def _SendInput(self, data: dict[str, Any]) -> None:  # noqa: N802
        running = self._find(data)
        name, value = next(iter(data["input"].items()))
        piece = base64.b64decode(value)
        running.input_seen += piece
        if name == "pty":
            assert running.terminal is not None
            os.write(running.terminal, piece)
        else:
            assert running.process.stdin is not None
            try:
                running.process.stdin.write(piece)
                running.process.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise RpcError("failed_precondition", "the input is closed") from error
        self.http._json(200, {})

    def _CloseStdin(self, data: dict[str, Any]) -> None:  # noqa: N802
        running = self._find(data)
        assert running.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            running.process.stdin.close()
        self.http._json(200, {})

    def _SendSignal(self, data: dict[str, Any]) -> None:  # noqa: N802
        running = self._find(data)
        self.state.signals.append((running.process.pid, data["signal"]))
        number = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}[data["signal"]]
        os.killpg(running.process.pid, number)
        self.http._json(200, {})

    def _Update(self, data: dict[str, Any]) -> None:  # noqa: N802
        running = self._find(data)
        size = data["pty"]["size"]
        self.state.sizes.append((size["cols"], size["rows"]))
        assert running.terminal is not None
        fcntl.ioctl(running.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))
        self.http._json(200, {})


def _end_event(returncode: int) -> dict[str, Any]:
    if returncode < 0:
        status = "signal: " + GO_SIGNALS.get(-returncode, f"signal {-returncode}")
        # Only the kernel kills without being asked in these tests.
        error = f"{status} (out of memory)" if returncode == -9 else status
        return {"end": {"exitCode": -1, "exited": False, "status": status, "error": error}}
    return {"end": {"exitCode": returncode, "exited": True, "status": f"exit status {returncode}"}}
