"""The node's SQLite database: sandbox records, tombstones, counters. The record of what exists on this node.

WAL with synchronous=NORMAL: a committed row survives the death of every process. Rows that promise durability (a
durable pause) are written with synchronous=FULL, so that they survive a power loss too. Calls take well under a
millisecond and run on the event loop; one connection, one thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from agentenv.errors import OperationFailed, StorageFull
from agentenv.model import Tombstone
from agentenv.node.record import SandboxRecord

SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 5.0
TOMBSTONE_KEEP_S: Final = 24 * 3600.0

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tombstones (
    id TEXT PRIMARY KEY, ended_at REAL NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tombstones_by_end ON tombstones (ended_at);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


class Database:
    """One open database. Raises `StorageFull` or `OperationFailed`; a failed write changed nothing."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise OperationFailed(f"{path} has schema version {version}; this server knows up to {SCHEMA_VERSION}")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(SandboxRecord)

    def close(self) -> None:
        self._db.close()

    def save(self, record: SandboxRecord, *, durable: bool = False) -> None:
        """Insert or replace a record."""
        row = (record.sandbox_id, self._encoder.encode(record))
        self._write("INSERT OR REPLACE INTO sandboxes VALUES (?, ?)", row, durable=durable)

    def delete(self, sandbox_id: str) -> None:
        self._write("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))

    def load(self) -> list[SandboxRecord]:
        """All records, in no particular order."""
        return [self._decoder.decode(raw) for (raw,) in self._db.execute("SELECT record FROM sandboxes")]

    def bury(self, tombstone: Tombstone) -> None:
        """Keep why a sandbox ended; forget tombstones older than a day. The first reason stays."""
        row = (tombstone.sandbox_id, tombstone.ended_at, tombstone.reason, tombstone.detail)
        self._write("INSERT OR IGNORE INTO tombstones VALUES (?, ?, ?, ?)", row)
        self._write("DELETE FROM tombstones WHERE ended_at < ?", (tombstone.ended_at - TOMBSTONE_KEEP_S,))

    def tombstone(self, sandbox_id: str) -> Tombstone | None:
        query = "SELECT id, ended_at, reason, detail FROM tombstones WHERE id = ?"
        row = self._db.execute(query, (sandbox_id,)).fetchone()
        return Tombstone(*row) if row else None

    def next_value(self, counter: str) -> int:
        """Count up and return the new value; never returns the same one twice."""
        self._write(
            "INSERT INTO counters VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1",
            (counter,),
        )
        return self.value(counter)

    def set_value(self, counter: str, value: int) -> None:
        self._write("INSERT OR REPLACE INTO counters VALUES (?, ?)", (counter, value))

    def value(self, counter: str) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (counter,)).fetchone()
        return int(row[0]) if row else 0

    def _write(self, statement: str, values: Iterable[object], *, durable: bool = False) -> None:
        try:
            if durable:
                self._db.execute("PRAGMA synchronous=FULL")
            try:
                self._db.execute(statement, tuple(values))
            finally:
                if durable:
                    self._db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise StorageFull("the node's database cannot be written: the disk is full") from error
            raise OperationFailed(f"the node's database cannot be written: {error}") from error
