"""The control plane: sandboxes, snapshots, templates and the node, in memory."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from tests.unit.cli.fake_server.handler import Handler, Request
from tests.unit.cli.fake_server.state import API_KEY


class Control:
    """One request to the API."""

    def __init__(self, handler: Handler, request: Request) -> None:
        self.http = handler
        self.state = handler.state
        self.request = request

    def serve(self) -> None:
        request = self.request
        if request.headers.get("x-api-key") != API_KEY:
            self.http.error(401, "invalid API key")
            return
        data = json.loads(request.body) if request.body else {}
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        match (request.method, *parts):
            case ("POST", "v2", "sandboxes"):
                if data["templateID"] == "missing":
                    self.http.error(404, "template 'missing' not found")
                    return
                sandbox_id = self.state.add(templateID=data["templateID"], metadata=data.get("metadata", {}))
                self.http.json(201, self.state.sandboxes[sandbox_id])
            case ("GET", "v2", "sandboxes"):
                wanted = request.query.get("state", "running,paused").split(",")
                self._page([box for box in self.state.sandboxes.values() if box["state"] in wanted])
            case ("GET", "snapshots"):
                self._page(self.state.snapshots)
            case ("GET", "templates"):
                self.http.json(200, self.state.templates)
            case ("GET", "aenv", "node"):
                self.http.json(200, {"driver": "qemu", "sandboxes": {"running": len(self.state.sandboxes)}})
            case ("GET", "aenv", "sandboxes", sandbox_id) if sandbox_id in self.state.sandboxes:
                self.http.json(200, {"sandboxID": sandbox_id, "pauseSafety": self.state.pause_safety.get(sandbox_id)})
            case ("GET", "aenv", "tombstones", sandbox_id) if sandbox_id in self.state.tombstones:
                self.http.json(200, self.state.tombstones[sandbox_id])
            case ("DELETE", "templates", reference):
                known = [item for item in self.state.snapshots if item["snapshotID"] == reference]
                if not known:
                    self.http.error(404, f"snapshot {reference!r} not found")
                    return
                self.state.snapshots.remove(known[0])
                self.http.answer(204)
            case (_, "sandboxes", sandbox_id, *action) | (_, "v2", "sandboxes", sandbox_id, *action):
                self._sandbox(sandbox_id, "/".join(action), data)
            case _:
                self.http.error(404, f"no route {request.path}")

    def _page(self, items: list[dict[str, Any]]) -> None:
        start = int(self.request.query.get("nextToken", "0"))
        end = start + min(self.state.page_items, int(self.request.query.get("limit", "100")))
        headers = {"X-Next-Token": str(end)} if end < len(items) else {}
        self.http.json(200, items[start:end], headers)

    def _sandbox(self, sandbox_id: str, action: str, data: dict[str, Any]) -> None:
        box = self.state.sandboxes.get(sandbox_id)
        if box is None:
            self.http.error(404, f"sandbox {sandbox_id} not found: deleted")
            return
        match (self.request.method, action):
            case ("GET", ""):
                self.http.json(200, box)
            case ("DELETE", ""):
                del self.state.sandboxes[sandbox_id]
                self.http.answer(204)
            case ("POST", "pause"):
                if box["state"] == "paused":
                    self.http.error(409, f"sandbox {sandbox_id} is paused already")
                    return
                box["state"] = "paused"
                self.http.answer(204)
            case ("POST", "connect"):
                was_paused = box["state"] == "paused"
                box["state"] = "running"
                self.http.json(201 if was_paused else 200, box)
            case ("POST", "timeout"):
                self.http.answer(204)
            case ("POST", "fork"):
                count = data["count"]
                children: list[dict[str, Any]] = [
                    {"sandbox": self.state.sandboxes[self.state.add()]} for _ in range(min(count, 3))
                ]
                children += [{"error": {"code": 429, "message": "no room"}} for _ in range(count - len(children))]
                self.http.json(201, children)
            case ("POST", "snapshots"):
                name = data.get("name")
                snapshot = {"snapshotID": f"team/{name}:default" if name else "sabc:default", "names": [name or ""]}
                self.state.snapshots.append(snapshot)
                self.http.json(201, snapshot)
            case _:
                self.http.error(404, f"no route {action}")
