"""What the fake server knows, and what tests change and look at."""

from __future__ import annotations

import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

API_KEY = "e2b_" + "ab" * 20


class RpcError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


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
