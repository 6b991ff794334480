"""The guest's processes as a client sees them, and the faults of their streams."""

# Methods are named as in the service.
# ruff: noqa: N802

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import struct
import termios
from typing import Any

from tests.unit.cli.fake_server.files import Files
from tests.unit.cli.fake_server.handler import Handler
from tests.unit.cli.fake_server.programs import spawn
from tests.unit.cli.fake_server.state import RpcError, Running


class Processes:
    """One request to the process service."""

    def __init__(self, handler: Handler, headers: dict[str, str]) -> None:
        self.http = handler
        self.state = handler.state
        self.headers = headers
        self.files = Files(handler)

    def Start(self, body: bytes) -> None:
        data = json.loads(body[5:])
        config = data["process"]
        argv = [config["cmd"], *config["args"]]
        if argv[0].startswith("fault:"):
            return self._fault(argv[0].removeprefix("fault:"))
        cwd = self.files.local(config.get("cwd", "/home"))
        self.http.begin_stream()
        if not cwd.is_dir():
            return self.http.end_stream(
                {"code": "invalid_argument", "message": f"cwd '{config['cwd']}' does not exist"}
            )
        env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GUEST_ROOT": str(self.state.root), **config["envs"]}
        if argv[0] in self.state.missing_programs or shutil.which(argv[0]) is None:
            self.http.event("start", {"pid": 1})
            self.http.event("data", {"stderr": base64.b64encode(f"{argv[0]}: not found\n".encode()).decode()})
            self.http.event("end", {"exitCode": 127, "exited": True, "status": "exit status 127", "error": "not found"})
            return self.http.end_stream()
        if argv[0] in ("tar", "chmod"):
            # Programs that take guest paths: from the scratch root, with paths relative to it.
            program = self.state.programs.get(argv[0], argv[0])
            argv = [program, *(str(self.files.local(a)) if a.startswith("/") else a for a in argv[1:])]
        running = spawn(self.state, argv, data, cwd, env)
        self._follow(running, float(self.headers.get("connect-timeout-ms", "inf")) / 1000)
        return None

    def _fault(self, kind: str) -> None:
        self.http.begin_stream()
        if kind == "no-start":
            self.http.event("data", {"stdout": ""})
            return self.http.end_stream()
        self.http.event("start", {"pid": 1})
        self.http.event("data", {"stdout": base64.b64encode(b"before\n").decode()})
        match kind:
            case "reset":
                self.http.reset()
            case "paused":
                self.state.sandboxes[self.headers["e2b-sandbox-id"]]["state"] = "paused"
                self.http.reset()
            case "killed":
                del self.state.sandboxes[self.headers["e2b-sandbox-id"]]
                self.http.reset()
            case "half":
                self.http.chunk(struct.pack(">BI", 0, 100) + b'{"event"')
                self.http.wfile.write(b"0\r\n\r\n")
            case "no-end-frame":
                self.http.wfile.write(b"0\r\n\r\n")
            case "no-end-event":
                self.http.end_stream()
            case "compressed":
                self.http.message({}, 1)
            case "huge":
                self.http.chunk(struct.pack(">BI", 0, 1 << 31))
            case "not-json":
                self.http.chunk(struct.pack(">BI", 0, 3) + b"{{{")
            case _:
                self.http.end_stream({"code": kind, "message": f"it is {kind}"})
        return None

    def _follow(self, running: Running, timeout_s: float) -> None:
        self.http.event("start", {"pid": running.process.pid})
        position = 0
        while True:
            with running.news:
                arrived = running.news.wait_for(
                    lambda: len(running.events) > position,  # noqa: B023 - called before the next round
                    None if timeout_s == float("inf") else timeout_s,
                )
            if not arrived:
                os.killpg(running.process.pid, signal.SIGKILL)
                return self.http.end_stream({"code": "deadline_exceeded", "message": "timed out"})
            event = running.events[position]
            position += 1
            self.http.message({"event": event})
            if "end" in event:
                return self.http.end_stream()

    def _find(self, data: dict[str, Any]) -> Running:
        running = self.state.running.get(data["process"]["pid"])
        if running is None:
            raise RpcError("not_found", f"process with pid {data['process']['pid']} not found")
        return running

    def Connect(self, body: bytes) -> None:
        data = json.loads(body[5:])
        self.http.begin_stream()
        try:
            running = self._find(data)
        except RpcError as error:
            return self.http.end_stream({"code": error.code, "message": str(error)})
        return self._follow(running, float("inf"))

    def List(self, data: dict[str, Any]) -> None:
        items = [
            {"pid": pid, "config": {"cmd": item.argv[0], "args": item.argv[1:]}}
            for pid, item in self.state.running.items()
        ]
        self.http.json(200, {"processes": items})

    def SendInput(self, data: dict[str, Any]) -> None:
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
        self.http.json(200, {})

    def CloseStdin(self, data: dict[str, Any]) -> None:
        running = self._find(data)
        assert running.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            running.process.stdin.close()
        self.http.json(200, {})

    def SendSignal(self, data: dict[str, Any]) -> None:
        running = self._find(data)
        self.state.signals.append((running.process.pid, data["signal"]))
        number = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}[data["signal"]]
        os.killpg(running.process.pid, number)
        self.http.json(200, {})

    def Update(self, data: dict[str, Any]) -> None:
        running = self._find(data)
        size = data["pty"]["size"]
        self.state.sizes.append((size["cols"], size["rows"]))
        assert running.terminal is not None
        fcntl.ioctl(running.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))
        self.http.json(200, {})
