"""The JSON shapes of images and storage, and from the values of `model` to them. Pure.

The conventions are those of `wire`; sizes are bytes unless the name says MB (which, as in E2B's API, means MiB).
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from agentenv import model
from agentenv.api.render import timestamp
from agentenv.api.wire import Answer, ErrorBody, Request, Template


class ProgressLine(Answer, rename="camel", kw_only=True):
    """One line of a progress stream. Exactly one of `progress`, `error` and the result's own field is there."""

    progress: str | UnsetType = UNSET
    done_bytes: int | UnsetType = UNSET
    total_bytes: int | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


class Image(Answer, rename="camel"):
    """A converted image; see `model.ImageInfo`."""

    references: list[str]
    digest: str
    layers: list[str]
    size_bytes: int
    disk_size_mb: int = field(name="diskSizeMB")
    created_at: str


class NewImage(Request):
    """Body of POST /aenv/images."""

    reference: str
    disk_size_mb: int | None = field(name="diskSizeMB", default=None)


class ExportRequest(Request):
    """Body of POST /aenv/snapshots/{id}/export."""

    compression: str | None = None
    reference: str | None = None


class Tier(Answer, rename="camel"):
    """One of the three tiers; see `model.TierUsage`. Where `unavailable` says why, only the location is known."""

    location: str
    size_bytes: int | None
    files: int | None
    shared_bytes: int | None
    garbage_bytes: int | None
    size_bytes_max: int | None
    free_bytes: int | None
    counters: dict[str, int]
    unavailable: str | None


class Storage(Answer):
    """Answer of GET /aenv/storage."""

    backend: str
    encrypted: bool
    snapshots: int
    staging: Tier
    repository: Tier
    cache: Tier


class GcRequest(Request):
    """Body of POST /aenv/storage/gc."""

    grace_s: float | None = field(name="graceS", default=None)


class Gc(Answer, rename="camel"):
    """What a collection removed; see `model.GcReport`."""

    grace_s: float
    removed_files: int
    freed_bytes: int
    young_files: int
    young_bytes: int
    forgotten_layers: int


class StoredDamage(Answer):
    """One damaged thing; see `model.Damage`."""

    tier: str
    item: str
    detail: str
    dependents: list[str]
    repaired: bool


class Verified(Answer, rename="camel"):
    """What verify and repair answer."""

    checked_files: int
    checked_bytes: int
    damages: list[StoredDamage]


class TemplateLine(ProgressLine, kw_only=True):
    """A line of POST /aenv/templates."""

    template: Template | UnsetType = UNSET


class ImageLine(ProgressLine, kw_only=True):
    """A line of POST /aenv/images."""

    image: Image | UnsetType = UNSET


class ReportLine(ProgressLine, kw_only=True):
    """A line of verify and repair."""

    report: Verified | UnsetType = UNSET


def image(info: model.ImageInfo) -> Image:
    """One converted image."""
    return Image(
        references=list(info.references),
        digest=info.digest,
        layers=list(info.layers),
        size_bytes=info.size_bytes,
        disk_size_mb=info.disk_mib,
        created_at=timestamp(info.created_at),
    )


def storage(report: model.StorageReport) -> Storage:
    """The three tiers."""
    return Storage(
        backend=report.backend,
        encrypted=report.encrypted,
        snapshots=report.snapshots,
        staging=_tier(report.staging),
        repository=_tier(report.repository),
        cache=_tier(report.cache),
    )


def _tier(usage: model.TierUsage | model.TierUnavailable) -> Tier:
    if isinstance(usage, model.TierUnavailable):
        return Tier(
            location=usage.location,
            size_bytes=None,
            files=None,
            shared_bytes=None,
            garbage_bytes=None,
            size_bytes_max=None,
            free_bytes=None,
            counters={},
            unavailable=usage.reason,
        )
    return Tier(
        location=usage.location,
        size_bytes=usage.size_bytes,
        files=usage.files,
        shared_bytes=usage.shared_bytes,
        garbage_bytes=usage.garbage_bytes,
        size_bytes_max=usage.size_bytes_max,
        free_bytes=usage.free_bytes,
        counters=dict(usage.counters),
        unavailable=None,
    )


def gc(report: model.GcReport) -> Gc:
    """What a collection removed."""
    return Gc(
        grace_s=report.grace_s,
        removed_files=report.removed_files,
        freed_bytes=report.freed_bytes,
        young_files=report.young_files,
        young_bytes=report.young_bytes,
        forgotten_layers=report.forgotten_layers,
    )


def verified(report: model.VerifyReport) -> Verified:
    """What was read and what is damaged."""
    return Verified(
        checked_files=report.checked_files,
        checked_bytes=report.checked_bytes,
        damages=[
            StoredDamage(
                tier=damage.tier,
                item=damage.item,
                detail=damage.detail,
                dependents=list(damage.dependents),
                repaired=damage.repaired,
            )
            for damage in report.damages
        ],
    )
