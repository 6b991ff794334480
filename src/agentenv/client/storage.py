"""The control plane's calls about the server's storage: what is where, collect garbage, verify, repair."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.client.api import Api
from agentenv.client.progress import Progress, events, result_of
from agentenv.client.values import Json, as_list, as_object, integer, text

TIERS: Final = ("staging", "repository", "cache")
_SIZES: Final = ("size_bytes", "files", "shared_bytes", "garbage_bytes", "size_bytes_max", "free_bytes")
# A collection lists everything that is stored.
GC_S_MAX: Final = 3700.0
USAGE_S_MAX: Final = 600.0


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One of the three tiers. `size_bytes_max` is its bound and `free_bytes` what is left, where there is one.

    The repository of a server that cannot reach its store has None for every size, and the reason in `unavailable`.
    """

    name: str
    location: str
    size_bytes: int | None
    files: int | None
    shared_bytes: int | None
    garbage_bytes: int | None
    size_bytes_max: int | None
    free_bytes: int | None
    counters: Mapping[str, int]
    unavailable: str | None = None

    @classmethod
    def of(cls, name: str, value: Any) -> TierUsage:
        """Raises `ProtocolError`."""
        data = as_object(value, name)
        counters = as_object(data.get("counters", {}), "counters")
        if data.get("unavailable") is not None:
            nothing = dict.fromkeys(_SIZES)
            return cls(name, text(data, "location"), **nothing, counters={}, unavailable=text(data, "unavailable"))
        return cls(
            name=name,
            location=text(data, "location"),
            size_bytes=integer(data, "sizeBytes"),
            files=integer(data, "files"),
            shared_bytes=integer(data, "sharedBytes", 0),
            garbage_bytes=integer(data, "garbageBytes", 0),
            size_bytes_max=_optional(data, "sizeBytesMax"),
            free_bytes=_optional(data, "freeBytes"),
            counters={str(key): integer(counters, key) for key in counters},
        )


@dataclass(frozen=True, slots=True)
class StorageReport:
    """The three tiers of one server; `tiers` in the order staging, repository, cache."""

    backend: str
    encrypted: bool
    snapshots: int
    tiers: tuple[TierUsage, ...]
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> StorageReport:
        """Raises `ProtocolError`."""
        data = as_object(value, "storage")
        tiers = tuple(TierUsage.of(name, data.get(name)) for name in TIERS)
        return cls(text(data, "backend"), data.get("encrypted") is True, integer(data, "snapshots", 0), tiers, data)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection removed, and the garbage that was younger than the grace."""

    grace_s: float
    removed_files: int
    freed_bytes: int
    young_files: int
    young_bytes: int
    # Converted layers that are not kept any longer, because the image that they were made for never came to be.
    forgotten_layers: int
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> GcReport:
        """Raises `ProtocolError`."""
        data = as_object(value, "gc")
        return cls(
            grace_s=float(integer(data, "graceS")),
            removed_files=integer(data, "removedFiles"),
            freed_bytes=integer(data, "freedBytes"),
            young_files=integer(data, "youngFiles", 0),
            young_bytes=integer(data, "youngBytes", 0),
            forgotten_layers=integer(data, "forgottenLayers", 0),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class Damage:
    """One stored thing that is missing or wrong, what needs it, and whether a repair made it whole again."""

    tier: str
    item: str
    detail: str
    dependents: tuple[str, ...]
    repaired: bool

    @classmethod
    def of(cls, value: Any) -> Damage:
        """Raises `ProtocolError`."""
        data = as_object(value, "damage")
        dependents = tuple(str(name) for name in as_list(data.get("dependents", []), "dependents"))
        return cls(
            text(data, "tier"), text(data, "item"), text(data, "detail"), dependents, data.get("repaired") is True
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and all damage that was met."""

    checked_files: int
    checked_bytes: int
    damages: tuple[Damage, ...]
    raw: Json = field(repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged any more."""
        return all(damage.repaired for damage in self.damages)

    @classmethod
    def of(cls, value: Any) -> VerifyReport:
        """Raises `ProtocolError`."""
        data = as_object(value, "report")
        damages = tuple(Damage.of(item) for item in as_list(data.get("damages"), "damages"))
        return cls(integer(data, "checkedFiles"), integer(data, "checkedBytes"), damages, data)


class Storage:
    """The storage of one server. Every method raises `ApiError`, `TransportError` or `ProtocolError` classes."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def show(self) -> StorageReport:
        """The three tiers with their sizes, shared bytes and garbage."""
        answer = await self._api.call("GET", "/aenv/storage", 200, idempotent=True, read_timeout_s=USAGE_S_MAX)
        return StorageReport.of(answer.data)

    async def collect(self, *, grace_s: float | None = None) -> GcReport:
        """Remove garbage older than `grace_s`, by default the server's own grace."""
        body = {} if grace_s is None else {"graceS": grace_s}
        answer = await self._api.call("POST", "/aenv/storage/gc", 200, body=body, read_timeout_s=GC_S_MAX)
        return GcReport.of(answer.data)

    def verify_events(self) -> AsyncGenerator[Progress | VerifyReport, None]:
        """Read everything that is stored: signs of progress, then the report."""
        return events(self._api, "/aenv/storage/verify", None, "report", VerifyReport.of)

    async def verify(self, *, progress: Callable[[Progress], None] | None = None) -> VerifyReport:
        """Read everything that is stored. Damage is in the report and no error. Raises `Conflict` when one runs."""
        return await result_of(self.verify_events(), progress)

    def repair_events(self) -> AsyncGenerator[Progress | VerifyReport, None]:
        """Verify and make whole what can be: signs of progress, then the report."""
        return events(self._api, "/aenv/storage/repair", None, "report", VerifyReport.of)

    async def repair(self, *, progress: Callable[[Progress], None] | None = None) -> VerifyReport:
        """Verify and make whole what can be. Raises `Conflict` when one runs."""
        return await result_of(self.repair_events(), progress)


def _optional(data: Json, name: str) -> int | None:
    return None if data.get(name) is None else integer(data, name)
