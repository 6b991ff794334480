"""Handlers of /aenv/storage: what is where, collecting garbage, verifying and repairing; and what they need."""

from __future__ import annotations

from typing import Any, Final, Protocol

from starlette.responses import Response

from agentenv.api import stored
from agentenv.api.call import Call, NoBody, json_response
from agentenv.api.errors import NotServed
from agentenv.api.streams import with_progress
from agentenv.errors import InvalidRequest
from agentenv.model import GcReport, Report, StorageReport, VerifyReport

GRACE_S_MAX: Final = 30 * 86_400.0
# A collection lists everything once; a verify reads everything, which takes hours for terabytes.
GC_S_MAX: Final = 3600.0
VERIFY_S_MAX: Final = 24 * 3600.0


class StorageService(Protocol):
    """What the API needs of the three tiers; wired by the server.

    Every method raises only `AenvError`s, `Conflict` where the same thing runs already. A caller that is cancelled ends
    the work at its next step; nothing that a record names is ever half removed or half repaired.
    """

    async def usage(self) -> StorageReport:
        """Sizes of the three tiers. Lists the repository, so it takes seconds for a large one.

        While its store is out the repository is told as unavailable, after seconds.
        """

    async def collect(self, grace_s: float | None) -> GcReport:
        """Remove garbage of staging and repository older than `grace_s` (None: the configured grace)."""

    async def verify(self, report: Report) -> VerifyReport:
        """Read everything that is stored and compare it with its digests; changes nothing."""

    async def repair(self, report: Report) -> VerifyReport:
        """Verify, and make whole what can be: cached blocks are dropped, layers fetched or made again."""


async def usage(call: Call[NoBody]) -> Response:
    """GET /aenv/storage: staging, repository and cache with sizes, shared bytes and garbage."""
    return json_response(200, stored.storage(await service(call).usage()))


async def collect(call: Call[stored.GcRequest]) -> Response:
    """POST /aenv/storage/gc: remove garbage that is older than a grace."""
    storage = service(call)
    grace_s = call.body.grace_s
    if grace_s is not None and not 0 <= grace_s <= GRACE_S_MAX:
        raise InvalidRequest(f"graceS: {grace_s:g} is not from 0 to {GRACE_S_MAX:g}")
    return json_response(200, stored.gc(await storage.collect(grace_s)))


async def verify(call: Call[NoBody]) -> Response:
    """POST /aenv/storage/verify: read everything; answers what is damaged and what depends on it."""
    storage = service(call)

    async def work(report: Report) -> stored.Verified:
        return stored.verified(await storage.verify(report))

    return await with_progress(call, work, 200, "verifying", _last)


async def repair(call: Call[NoBody]) -> Response:
    """POST /aenv/storage/repair: verify, and make whole what can be."""
    storage = service(call)

    async def work(report: Report) -> stored.Verified:
        return stored.verified(await storage.repair(report))

    return await with_progress(call, work, 200, "repairing", _last)


def _last(report: stored.Verified) -> stored.ReportLine:
    return stored.ReportLine(report=report)


def service(call: Call[Any]) -> StorageService:
    """Raises `NotServed` on a server that was put together without storage."""
    if call.context.storage is None:
        raise NotServed("this server tells nothing of its storage")
    return call.context.storage
