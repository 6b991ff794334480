"""The node's database: what is stored comes back, tombstones fade, a full disk changes nothing."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import OperationFailed
from agentenv.lifecycle import Phase
from agentenv.model import DiskStack, MachineFingerprint, MemoryStack, Resources, SandboxSpec, Tombstone
from agentenv.node.database import TOMBSTONE_KEEP_S, Database
from agentenv.node.record import PendingCapture, SandboxRecord
from agentenv.vmm import VmmRecord

MACHINE = MachineFingerprint("qemu", "tcg", "7.2", "max", "6.12", 1, "h")
RECORD = SandboxRecord(
    sandbox_id="i1",
    phase=Phase.HELD_CAPTURING,
    spec=SandboxSpec("base", 300, metadata={"a": "b"}),
    template_id="s1",
    alias="base",
    resources=Resources(1, 512, 8192),
    started_at=1.5,
    end_at=2.5,
    generation=7,
    token_owner="i1",
    disk=DiskStack(1 << 30, ("d1", "d2")),
    upper="u1",
    memory=MemoryStack("m", 512 << 20, ("m1",)),
    vmm=VmmRecord("qemu", "i1", 12, 34, "/run/x", MACHINE, 512 << 20, {"memory_image": "/x"}),
    slot=3,
    boot_id="b",
    pending=PendingCapture("m2", "v2"),
)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    database = Database(tmp_path / "node.db")
    database.save(replace(RECORD, slot=1))
    database.save(RECORD, durable=True)
    database.close()
    assert Database(tmp_path / "node.db").load() == [RECORD]


def test_a_counter_never_repeats_across_restarts(tmp_path: Path) -> None:
    first = Database(tmp_path / "node.db")
    seen = [first.next_value("generation") for _ in range(3)]
    first.close()
    assert Database(tmp_path / "node.db").next_value("generation") == max(seen) + 1


def test_the_first_tombstone_stays_and_old_ones_go(tmp_path: Path) -> None:
    database = Database(tmp_path / "node.db")
    database.bury(Tombstone("i1", 100.0, "vmm_died", "killed by 9"))
    database.bury(Tombstone("i1", 101.0, "deleted"))
    assert database.tombstone("i1") == Tombstone("i1", 100.0, "vmm_died", "killed by 9")
    database.bury(Tombstone("i2", 100.0 + TOMBSTONE_KEEP_S + 1, "deleted"))
    assert database.tombstone("i1") is None


def test_a_database_of_a_newer_server_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "node.db") as newer:
        newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(OperationFailed, match="99"):
        Database(tmp_path / "node.db")


def test_record_names_every_layer_it_needs() -> None:
    assert RECORD.layer_ids() == {"d1", "d2", "m1", "m2", "v2"}
