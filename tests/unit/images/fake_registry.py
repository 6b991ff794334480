"""A registry inside the process, as an httpx transport: no sockets, and every fault a real one shows, on demand."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentenv.images import media

# Answers instead of the registry, or None to let it answer.
Fault = Callable[[httpx.Request], httpx.Response | None]


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


class Broken(httpx.AsyncByteStream):
    """A body that breaks off: some bytes, then a closed connection."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


class Body(httpx.AsyncByteStream):
    """A body as a network brings it: in pieces, once."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._content), 65_536):
            yield self._content[at : at + 65_536]


@dataclass
class FakeRegistry:
    """Blobs by digest, manifests by digest and tag, for any repository of any host."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    referrers: dict[str, bytes] = field(default_factory=dict)
    # Host -> "basic" or "bearer"; the only accepted login is user:secret.
    auth: dict[str, str] = field(default_factory=dict)
    # Blobs of these hosts are elsewhere.
    redirects: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    tokens_given: int = 0
    etag: str | None = '"v1"'
    ranges: bool = True

    def transport(self) -> httpx.MockTransport:
        async def answer(request: httpx.Request) -> httpx.Response:
            made = await self._answer(request)
            # A response with its content given counts as read already, which none from a network does.
            if not made.is_closed:
                return made
            return httpx.Response(made.status_code, headers=made.headers, stream=Body(made.content))

        return httpx.MockTransport(answer)

    def add_blob(self, content: bytes) -> str:
        self.blobs[digest_of(content)] = content
        return digest_of(content)

    def add_manifest(self, body: Any, media_type: str = media.OCI_MANIFEST, tag: str | None = None) -> str:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        for name in [digest_of(raw), *([tag] if tag else [])]:
            self.manifests[name] = (media_type, raw)
        return digest_of(raw)

    def paths(self) -> list[str]:
        """`host path` of every request so far."""
        return [f"{request.url.host}{request.url.path}" for request in self.requests]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        for fault in self.faults:
            if (answer := fault(request)) is not None:
                return answer
        if request.url.path == "/token":
            return self._token(request)
        host, path = request.url.host, request.url.path
        if (demand := self._demand(request)) is not None:
            return demand
        if host in self.redirects and "/blobs/" in path:
            return httpx.Response(307, headers={"location": f"{self.redirects[host]}{path}?signature=s"})
        name = path.rpartition("/")[2]
        if "/manifests/" in path and name in self.manifests:
            media_type, raw = self.manifests[name]
            return httpx.Response(200, content=raw, headers={"content-type": media_type})
        if "/referrers/" in path and name in self.referrers:
            return httpx.Response(200, content=self.referrers[name], headers={"content-type": media.OCI_INDEX})
        if "/blobs/" in path and name in self.blobs:
            return self.blob_answer(request, self.blobs[name])
        return httpx.Response(404, json={"errors": [{"code": "UNKNOWN", "message": "it is not here"}]})

    def blob_answer(self, request: httpx.Request, content: bytes) -> httpx.Response:
        headers = {"etag": self.etag} if self.etag else {}
        wanted = request.headers.get("range")
        condition = request.headers.get("if-range")
        if wanted is None or not self.ranges or (condition is not None and condition != self.etag):
            return httpx.Response(200, content=content, headers=headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = int(last) + 1 if last else len(content)
        headers["content-range"] = f"bytes {first}-{end - 1}/{len(content)}"
        return httpx.Response(206, content=content[int(first) : end], headers=headers)

    def _demand(self, request: httpx.Request) -> httpx.Response | None:
        scheme = self.auth.get(request.url.host)
        given = request.headers.get("authorization", "")
        if scheme is None or (given and given in (_BASIC, f"Bearer t{self.tokens_given}")):
            return None
        if scheme == "basic":
            return httpx.Response(401, headers={"www-authenticate": 'Basic realm="r, s"'})
        demand = f'Bearer realm="https://auth.test/token",service="{request.url.host}",scope="repository:a/b:pull"'
        return httpx.Response(401, headers={"www-authenticate": demand})

    def _token(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != _BASIC:
            return httpx.Response(401)
        self.tokens_given += 1
        return httpx.Response(200, json={"token": f"t{self.tokens_given}", "expires_in": 300})


_BASIC = "Basic " + base64.b64encode(b"user:secret").decode()


def once(part: str, answer: Callable[[httpx.Request], httpx.Response], times: int = 1) -> Fault:
    """A fault for the first requests whose address holds `part`."""
    left = [times]

    def fault(request: httpx.Request) -> httpx.Response | None:
        if part not in str(request.url) or left[0] == 0:
            return None
        left[0] -= 1
        return answer(request)

    return fault


def always(part: str, answer: Callable[[httpx.Request], httpx.Response]) -> Fault:
    """A fault for every such request."""
    return once(part, answer, times=1 << 30)
