"""The committed repository: what a commit makes durable, what collection may take."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import InvalidRequest, StorageFull, TemplateNotFound
from agentenv.model import (
    DiskStack,
    MachineFingerprint,
    MemoryStack,
    Resources,
    SnapshotKind,
    SnapshotManifest,
)
from agentenv.snapshots import Catalog, Repository, parse_reference
from agentenv.snapshots import repository as repository_module

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


def test_a_committed_snapshot_is_loaded_as_it_was(tmp_path: Path) -> None:
    Repository(tmp_path).commit(MANIFEST)
    assert Repository(tmp_path).load() == [MANIFEST]


def test_a_damaged_record_is_skipped_and_kept(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.commit(MANIFEST)
    broken = tmp_path / "snapshots" / "s2.json"
    broken.write_bytes(b'{"version":1,"snapshot":{')
    assert repository.load() == [MANIFEST]
    assert broken.exists()


def test_a_full_disk_leaves_the_old_record_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(tmp_path)
    repository.commit(MANIFEST)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(repository_module.os, "fsync", full)
    with pytest.raises(StorageFull):
        repository.commit(replace(MANIFEST, created_at=2.0))
    assert repository.load() == [MANIFEST]
    assert os.listdir(tmp_path / "snapshots") == ["s1.json"]


def test_collect_takes_only_unneeded_candidates(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    for name in ("a", "b"):
        repository.layer_path(name).touch()
    repository.state_path("c").touch()
    candidates = repository.stored_ids()
    repository.layer_path("newer").touch()
    assert repository.collect(candidates, needed={"a"}) == 2
    assert repository.stored_ids() == {"a", "newer"}


def test_adopting_a_layer_twice_is_harmless_and_a_foreign_file_is_never_replaced(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "r")
    sealed = tmp_path / "upper"
    sealed.write_text("x")
    repository.adopt_layer(sealed, "a")
    repository.adopt_layer(sealed, "a")
    assert repository.layer_path("a").read_text() == "x"


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
