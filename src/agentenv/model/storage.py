"""What is stored where, what of it is garbage, and what is damaged. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One of the three tiers: staging, repository or cache."""

    # A directory, or a store as `s3://bucket/prefix`.
    location: str
    # What it takes on disk or in the store; a sparse file counts by its blocks, a shared layer once.
    size_bytes: int
    files: int
    # Of `size_bytes`: needed by more than one snapshot, image or sandbox.
    shared_bytes: int = 0
    # Of `size_bytes`: needed by nothing; a collection removes it once it is older than the grace.
    garbage_bytes: int = 0
    # The configured bound; None where there is none.
    size_bytes_max: int | None = None
    # What the file system below has left; None for a store.
    free_bytes: int | None = None
    # Counters since the daemon's start, by name (hits, misses, bytes_from_store, stalls...); only the cache has some.
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierUnavailable:
    """A tier that could not be asked: its store is out of reach."""

    location: str
    # What the store's error says.
    reason: str


@dataclass(frozen=True, slots=True)
class StorageReport:
    """The three tiers of one node."""

    # "posix_fs" or "oss".
    backend: str
    # Whether what is published now is encrypted at rest.
    encrypted: bool
    # Committed snapshots and templates, as far as this node knows them.
    snapshots: int
    staging: TierUsage
    repository: TierUsage | TierUnavailable
    cache: TierUsage


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one collection of staging and repository removed, and the garbage that was too young for it."""

    grace_s: float
    removed_files: int
    freed_bytes: int
    young_files: int = 0
    young_bytes: int = 0
    # Converted layers of images that never came to be, which are not kept for them any longer.
    forgotten_layers: int = 0


@dataclass(frozen=True, slots=True)
class Damage:
    """One stored thing that is missing or not what it must be, and what cannot be used without it."""

    # "staging", "repository" or "cache".
    tier: str
    # Its key in the repository (`layers/<digest>.lsmt`) or its path.
    item: str
    # What is wrong with it: one sentence.
    detail: str
    # What needs it, as `template base:default`, `snapshot s...`, `image python:3.12` or `sandbox i...`.
    dependents: tuple[str, ...] = ()
    # Whether it is whole again. Only a repair says so; how, is in `detail`.
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verify (or a repair, which verifies first) read, and all damage that it met."""

    checked_files: int
    checked_bytes: int
    damages: tuple[Damage, ...] = ()
