"""The control plane's calls about sandboxes: create, connect, list, and all that changes their state."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from agentenv.client.api import Api
from agentenv.client.errors import ApiError, NotFound, ProtocolError
from agentenv.client.sandbox import Sandbox
from agentenv.client.values import Json, SandboxInfo, SnapshotInfo, as_list, as_object, fork_error, text

PAGE_ITEMS_MAX: Final = 100
PAGES_MAX: Final = 10_000
STATES: Final = ("running", "paused")


class Sandboxes:
    """Sandboxes of one server. Every method raises `ApiError`, `TransportError` or `ProtocolError` classes."""

    def __init__(self, api: Api, sandbox_url: str) -> None:
        self._api = api
        self._sandbox_url = sandbox_url

    def handle(self, sandbox_id: str, access_token: str | None = None) -> Sandbox:
        """A handle without asking the server."""
        return Sandbox(self._api.transport, self._sandbox_url, sandbox_id, access_token)

    def _handle_of(self, value: Any) -> Sandbox:
        data = as_object(value, "sandbox")
        token = data.get("envdAccessToken")
        return Sandbox(self._api.transport, self._sandbox_url, text(data, "sandboxID"), token or None, data)

    async def create(
        self,
        template: str = "base",
        *,
        timeout_s: int | None = None,
        auto_pause: bool | None = None,
        auto_resume: bool = False,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        allow_internet: bool = True,
    ) -> Sandbox:
        """Start one from a template or snapshot. `auto_pause` None leaves the choice to the server (it pauses)."""
        body: dict[str, Any] = {"templateID": template, "secure": True}
        if timeout_s is not None:
            body["timeout"] = timeout_s
        if auto_pause is not None:
            body["autoPause"] = auto_pause
        if auto_resume:
            body["autoResume"] = {"enabled": True}
        if metadata:
            body["metadata"] = dict(metadata)
        if env:
            body["envVars"] = dict(env)
        if not allow_internet:
            body["allow_internet_access"] = False
        # The key makes a repeated create answer the first one's sandbox, so that a retry leaks none.
        key = {"Idempotency-Key": str(uuid.uuid4())}
        answer = await self._api.call("POST", "/v2/sandboxes", 201, body=body, headers=key, idempotent=True)
        return self._handle_of(answer.data)

    async def connect(self, sandbox_id: str, *, timeout_s: int | None = None) -> tuple[Sandbox, bool]:
        """Resume it if it is paused, extend its end (never shorten it); the flag says whether it was resumed."""
        body = {} if timeout_s is None else {"timeout": timeout_s}
        path = f"/v2/sandboxes/{quote(sandbox_id, safe='')}/connect"
        answer = await self._api.call("POST", path, 200, 201, body=body, idempotent=True)
        return self._handle_of(answer.data), answer.status == 201

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """Its state and settings. Raises `NotFound`, with the reason of its end where the server still knows it."""
        answer = await self._api.call("GET", _path(sandbox_id), 200, idempotent=True)
        return SandboxInfo.of(answer.data)

    async def pause_safety(self, sandbox_id: str) -> str | None:
        """`held` or `durable` while it is paused, else None; None, too, from a server that does not know the question.

        Raises `ApiError` classes except `NotFound`.
        """
        try:
            answer = await self._api.call("GET", f"/aenv/sandboxes/{quote(sandbox_id, safe='')}", 200, idempotent=True)
        except NotFound:
            return None
        safety = as_object(answer.data, "sandbox").get("pauseSafety")
        return None if safety is None else str(safety)

    async def tombstone(self, sandbox_id: str) -> Json | None:
        """Why it ended: `sandboxID`, `endedAt`, `reason`, `detail`. None for one that lives, never was, or ended more
        than a day ago.
        """
        try:
            answer = await self._api.call("GET", f"/aenv/tombstones/{quote(sandbox_id, safe='')}", 200, idempotent=True)
        except NotFound:
            return None
        return as_object(answer.data, "tombstone")

    async def open(self, sandbox_id: str) -> tuple[Sandbox, SandboxInfo]:
        """A handle with its token, without changing state or end."""
        info = await self.get(sandbox_id)
        return Sandbox(self._api.transport, self._sandbox_url, info.sandbox_id, info.envd_access_token, info.raw), info

    async def iterate(
        self,
        *,
        states: tuple[str, ...] = STATES,
        metadata: Mapping[str, str] | None = None,
        page_items: int = PAGE_ITEMS_MAX,
    ) -> AsyncIterator[SandboxInfo]:
        """All sandboxes in these states, newest first, fetched page by page while they are used."""
        params = {"state": ",".join(states), "limit": str(page_items)}
        if metadata:
            # The contract encodes each part, and the query as a whole once more.
            params["metadata"] = urlencode({quote(k, safe=""): quote(v, safe="") for k, v in metadata.items()})
        async for item in pages(self._api, "/v2/sandboxes", params):
            yield SandboxInfo.of(item)

    async def kill(self, sandbox_id: str) -> None:
        """End it, in any state. Raises `NotFound`."""
        await self._api.call("DELETE", _path(sandbox_id), 204, idempotent=True)

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Let it expire `timeout_s` from now; may shorten; 0 expires it at once. Raises `NotFound`."""
        path = f"{_path(sandbox_id)}/timeout"
        await self._api.call("POST", path, 204, body={"timeout": timeout_s}, idempotent=True)

    async def pause(self, sandbox_id: str) -> None:
        """Pause it with its memory. Raises `NotFound`, `Conflict` when it is paused already."""
        await self._api.call("POST", f"{_path(sandbox_id)}/pause", 204, body={})

    async def resume(self, sandbox_id: str, *, timeout_s: int | None = None) -> Sandbox:
        """Resume a paused one. Raises `Conflict` when it runs; `connect` does not."""
        body = {} if timeout_s is None else {"timeout": timeout_s}
        answer = await self._api.call("POST", f"{_path(sandbox_id)}/resume", 201, body=body)
        return self._handle_of(answer.data)

    async def fork(self, sandbox_id: str, *, count: int = 1, timeout_s: int | None = None) -> list[Sandbox | ApiError]:
        """Branch a running sandbox `count` times; one entry per child, the child or the error that it met."""
        body = {"count": count} if timeout_s is None else {"count": count, "timeout": timeout_s}
        answer = await self._api.call("POST", f"{_path(sandbox_id)}/fork", 201, body=body)
        children: list[Sandbox | ApiError] = []
        for item in as_list(answer.data, "fork"):
            data = as_object(item, "fork child")
            if ("sandbox" in data) == ("error" in data):
                raise ProtocolError("a fork child must hold either a sandbox or an error")
            children.append(self._handle_of(data["sandbox"]) if "sandbox" in data else fork_error(data["error"]))
        return children

    async def snapshot(self, sandbox_id: str, *, name: str | None = None) -> SnapshotInfo:
        """Commit its present state as a snapshot; it goes on running."""
        body = {} if name is None else {"name": name}
        answer = await self._api.call("POST", f"{_path(sandbox_id)}/snapshots", 201, body=body)
        return SnapshotInfo.of(answer.data)


def _path(sandbox_id: str) -> str:
    return f"/sandboxes/{quote(sandbox_id, safe='')}"


async def pages(api: Api, path: str, params: Mapping[str, str]) -> AsyncIterator[Any]:
    """The items of a paged list. Ends when no next token comes; a server that repeats one is a `ProtocolError`."""
    query = dict(params)
    for _ in range(PAGES_MAX):
        answer = await api.call("GET", path, 200, params=query, idempotent=True)
        for item in as_list(answer.data, path):
            yield item
        token = answer.next_token
        if not token:
            return
        if token == query.get("nextToken"):
            raise ProtocolError(f"{path}: the server repeats the same page")
        query["nextToken"] = token
    raise ProtocolError(f"{path}: more than {PAGES_MAX} pages")
