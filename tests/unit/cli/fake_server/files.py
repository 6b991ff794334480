"""The guest's files. Its root directory is a scratch directory, its home is /home."""

# Methods are named as in the service.
# ruff: noqa: N802

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.unit.cli.fake_server.handler import Handler
from tests.unit.cli.fake_server.state import RpcError


class Files:
    """One request to /files or to the file service."""

    def __init__(self, handler: Handler) -> None:
        self.http = handler
        self.state = handler.state

    def local(self, path: str) -> Path:
        absolute = path if path.startswith("/") else f"/home/{path.removeprefix('~').lstrip('/')}"
        return self.state.root / os.path.normpath(absolute).lstrip("/")

    def guest(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.state.root)).removeprefix(".")

    def entry(self, path: Path) -> dict[str, Any]:
        try:
            status = path.stat()
        except OSError as error:
            raise RpcError("not_found", f"path '{self.guest(path)}' does not exist") from error
        entry = {
            "name": path.name,
            "path": self.guest(path),
            "type": "FILE_TYPE_DIRECTORY" if path.is_dir() else "FILE_TYPE_FILE",
            "size": str(status.st_size),
            "mode": status.st_mode & 0o777,
            "permissions": "-rw-r--r--",
            "owner": "user",
            "group": "user",
            "modifiedTime": "2026-01-01T00:00:00Z",
        }
        return {**entry, "symlinkTarget": str(path.resolve())} if path.is_symlink() else entry

    def transfer(self, query: dict[str, str], body: bytes) -> None:
        path = self.local(query["path"])
        if self.http.command == "POST":
            if path.is_dir():
                self.http.json(400, {"code": 400, "message": f"path is a directory: {query['path']}"})
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body[: len(body) - self.state.upload_loss_bytes])
            path.chmod(0o644)
            self.http.json(200, [{"name": path.name, "path": self.guest(path), "type": "file"}])
        elif not path.is_file():
            status = 400 if path.is_dir() else 404
            self.http.json(status, {"code": status, "message": f"path '{query['path']}' does not exist"})
        elif path.name == "fault-short":
            self.http.send_response(200)
            self.http.send_header("Content-Length", "1000")
            self.http.end_headers()
            self.http.wfile.write(b"half")
            self.http.reset()
        else:
            self.http.answer(200, path.read_bytes())

    def Stat(self, data: dict[str, Any]) -> None:
        self.http.json(200, {"entry": self.entry(self.local(data["path"]))})

    def ListDir(self, data: dict[str, Any]) -> None:
        path = self.local(data["path"])
        self.http.json(200, {"entries": [self.entry(item) for item in sorted(path.iterdir())]})

    def MakeDir(self, data: dict[str, Any]) -> None:
        path = self.local(data["path"])
        if path.is_dir():
            raise RpcError("already_exists", "directory exists")
        if path.exists():
            raise RpcError("invalid_argument", "a file is in the way")
        path.mkdir(parents=True)
        self.http.json(200, {"entry": self.entry(path)})

    def Move(self, data: dict[str, Any]) -> None:
        target = self.local(data["destination"])
        self.local(data["source"]).rename(target)
        self.http.json(200, {"entry": self.entry(target)})

    def Remove(self, data: dict[str, Any]) -> None:
        path = self.local(data["path"])
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.http.json(200, {})
