"""Which names mean which snapshot. Pure: fed with manifests, it answers look-ups.

A name is `[namespace/]name[:tag]`, the tag `default` when absent. The newest committed snapshot that carries a name
owns it, so a second snapshot under the same name moves the name, and a crash between two commits cannot lose it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from agentenv.errors import InvalidRequest, TemplateNotFound
from agentenv.model import SnapshotKind, SnapshotManifest

DEFAULT_TAG: Final = "default"
REFERENCE_CHARS_MAX: Final = 255
_REFERENCE: Final = re.compile(r"^(?:[a-z0-9_-]+/)?[a-z0-9_-]+(?::[a-z0-9._-]+)?$")


def parse_reference(reference: str) -> str:
    """The full name `name:tag` of a reference, lower-cased. Raises `InvalidRequest` for anything else."""
    lowered = reference.lower()
    if len(lowered) > REFERENCE_CHARS_MAX or not _REFERENCE.match(lowered):
        shown = reference[:64]
        raise InvalidRequest(f"{shown!r} is not a name: use [namespace/]name[:tag] of a-z, 0-9, '-' and '_'")
    return lowered if ":" in lowered else f"{lowered}:{DEFAULT_TAG}"


class Catalog:
    """The committed snapshots that can be referred to, by id and by name."""

    def __init__(self, manifests: Iterable[SnapshotManifest] = ()) -> None:
        self._by_id: dict[str, SnapshotManifest] = {}
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: SnapshotManifest) -> None:
        self._by_id[manifest.snapshot_id] = manifest

    def discard(self, snapshot_id: str) -> None:
        self._by_id.pop(snapshot_id, None)

    def all(self) -> list[SnapshotManifest]:
        return list(self._by_id.values())

    def of_kind(self, kind: SnapshotKind) -> list[SnapshotManifest]:
        return [m for m in self._by_id.values() if m.kind is kind]

    def resolve(self, reference: str) -> SnapshotManifest:
        """By id or name, with or without a tag; pauses and forks cannot be referred to. Raises `TemplateNotFound`."""
        # `id:default` is how an unnamed snapshot is shown to the SDKs.
        found = self._by_id.get(reference.removesuffix(f":{DEFAULT_TAG}"))
        if found is None:
            found = self._owner_of_name(reference)
        if found is None or found.kind not in (SnapshotKind.TEMPLATE, SnapshotKind.SNAPSHOT):
            raise TemplateNotFound(f"template '{reference[:128]}' does not exist")
        return found

    def names_of(self, manifest: SnapshotManifest) -> tuple[str, ...]:
        """The names that the snapshot still owns: those that no newer one took over."""
        return tuple(name for name in manifest.names if self._owns(manifest, name))

    def _owns(self, manifest: SnapshotManifest, name: str) -> bool:
        owner = self._owner_of_name(name)
        return owner is not None and owner.snapshot_id == manifest.snapshot_id

    def _owner_of_name(self, reference: str) -> SnapshotManifest | None:
        try:
            name = parse_reference(reference)
        except InvalidRequest:
            return None
        owners = [m for m in self._by_id.values() if name in m.names]
        return max(owners, key=lambda m: (m.created_at, m.snapshot_id), default=None)
