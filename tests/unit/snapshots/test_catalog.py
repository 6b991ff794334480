"""Names of snapshots: which reference means which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.errors import InvalidRequest, TemplateNotFound
from agentenv.model import (
    DiskStack,
    MachineFingerprint,
    MemoryStack,
    Resources,
    SnapshotKind,
    SnapshotManifest,
)
from agentenv.snapshots import Catalog, parse_reference

MANIFEST = SnapshotManifest(
    snapshot_id="s1",
    kind=SnapshotKind.TEMPLATE,
    created_at=1.0,
    resources=Resources(1, 512, 2048),
    disk=DiskStack(1 << 30, ("d1",)),
    memory=MemoryStack("m", 512 << 20, ("m1",)),
    device_state="v1",
    machine=MachineFingerprint("qemu", "tcg", "7.2", "max", "6.12", 2600000, "abc"),
    token_owner="",
    names=("base:default",),
)


def test_names_move_to_the_newest_snapshot_and_back_when_it_is_removed() -> None:
    newer = replace(MANIFEST, snapshot_id="s2", created_at=2.0)
    catalog = Catalog([MANIFEST, newer])
    assert catalog.resolve("base").snapshot_id == "s2"
    assert catalog.names_of(MANIFEST) == ()
    catalog.discard("s2")
    assert catalog.resolve("base:default").snapshot_id == "s1"
    assert catalog.resolve("s1:default").snapshot_id == "s1"


def test_pauses_cannot_be_referred_to() -> None:
    catalog = Catalog([replace(MANIFEST, kind=SnapshotKind.PAUSE)])
    with pytest.raises(TemplateNotFound):
        catalog.resolve("s1")


@pytest.mark.parametrize("bad", ["", "a b", "a/b/c", "a:", "ä", "../x", "a" * 300])
def test_a_malformed_name_is_refused(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_reference(bad)
