"""Client of the proxy's control socket.

Every call is one request on a fresh connection: the proxy may have been replaced since the last one, and a call is rare
(once per end of a sandbox run). All calls are idempotent, so a caller may repeat one that failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from agentenv.errors import ProxyError

# The proxy answers in microseconds; the rest is for a host under load.
CALL_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ProxyHealth:
    """What a living proxy says of itself."""

    pid: int
    listen: str
    connections: int
    generations: tuple[int, ...]


class ProxyControl:
    """Speaks to the proxy that owns `socket`. Safe for concurrent use; close it with `aclose` or `async with`.

    Every method raises `ProxyError` when the proxy is absent, silent for `CALL_TIMEOUT_S`, or refuses.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        # Nothing here is encrypted; verify=False spares the loading of certificates.
        transport = httpx.AsyncHTTPTransport(
            uds=str(socket), verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://proxy", timeout=CALL_TIMEOUT_S, trust_env=False
        )

    async def __aenter__(self) -> ProxyControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release the client; calls under way fail."""
        await self._client.aclose()

    async def withdraw(self, generations: Iterable[int]) -> int:
        """End these runs: when this returns, nothing of them is cached or connected, and never will be again.

        Returns the number of client connections that were reset.
        """
        answer = await self._call("POST", "/withdraw", {"generations": sorted(generations)})
        return int(answer["aborted"])

    async def live(self, generations: Iterable[int], below: int) -> int:
        """After a restart of the server: end every run numbered below `below` that is not in `generations`."""
        answer = await self._call("PUT", "/live", {"generations": sorted(generations), "below": below})
        return int(answer["aborted"])

    async def health(self) -> ProxyHealth:
        """Who the proxy is and what it holds."""
        answer = await self._call("GET", "/health", None)
        return ProxyHealth(
            pid=int(answer["pid"]),
            listen=str(answer["listen"]),
            connections=int(answer["connections"]),
            generations=tuple(int(number) for number in answer["generations"]),
        )

    async def shutdown(self) -> None:
        """Make the proxy stop accepting; it exits when its answers have ended, 5 s later at most."""
        await self._call("POST", "/shutdown", None)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            response = await self._client.request(method, path, content=content)
            answer = response.json()
        except httpx.TransportError as error:
            raise ProxyError(f"the proxy at {self._socket} cannot be reached ({method} {path})") from error
        except ValueError as error:
            raise ProxyError(f"the proxy's answer to {method} {path} is not JSON") from error
        if response.status_code != httpx.codes.OK or not isinstance(answer, dict):
            raise ProxyError(f"the proxy refused {method} {path}: {response.status_code} {answer}")
        return answer
