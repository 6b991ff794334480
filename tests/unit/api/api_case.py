"""What the tests of the API share besides fixtures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

import httpx
from starlette.applications import Starlette

KEY: Final = "e2b_" + "0123456789abcdef0123456789abcdef01234567"


async def start(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """A started sandbox of the template `base`."""
    answer = await client.post("/v2/sandboxes", json={"templateID": "base", **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


class Connection:
    """One request whose messages the test hands over one by one."""

    def __init__(
        self, app: Starlette, method: str, path: str, headers: dict[str, str] | None = None, *, reads: bool = True
    ) -> None:
        self._reads = reads
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        given = {"x-api-key": KEY, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        if not self._reads:
            await asyncio.Event().wait()
        self.sent.append(message)

    def body(self, data: bytes, more: bool = False) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def received(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_complete(self) -> bool:
        """Whether the answer was sent to its end."""
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    @property
    def lines(self) -> list[Any]:
        """The lines of an NDJSON answer."""
        return [json.loads(line) for line in self.received.splitlines()]


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until `condition` holds; fails instead of hanging."""
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never became true")
