"""A crash at every operation of publish, commit, remove and sweep, then a restart: what was acknowledged is there.

Three worlds: between operations of a store; between file operations of a directory, with the process gone; and the
same with the power gone, where names and contents that were not synced are lost.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.snapshots.lossy_files import Crash, LossyFiles, Unsynced
from tests.unit.snapshots.repository_world import Node, content_ids

from agentenv.errors import AenvError, StorageFull
from agentenv.snapshots import MemoryStore, PosixStore, Store, ids_of
from agentenv.snapshots.blobs import layer_key, state_key
from agentenv.snapshots.stores import Entry, Object


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations in one order, so that the n-th is the same in every run."""

    async def at_once(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return work(*arguments, **named)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of lives are made of thousands of files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="aenv-") as folder:
        yield Path(folder)


class Story:
    """What a node does, and what it was told: `sure` is acknowledged, `maybe` was under way."""

    def __init__(self) -> None:
        self.sure: set[str] = set()
        self.maybe: set[str] = set()

    async def tell(self, node: Node) -> None:
        """Snapshots, a fork, a deletion, sweeps, and the deleted content once more."""
        await self._commit("s1", node.snapshot("s1", b"base"))
        base = await node.repository.get("s1")
        await self._commit("s2", node.snapshot("s2", b"top", upon=base))
        self.sure.discard("s1")
        self.maybe.add("s1")
        await node.repository.remove("s1")
        self.maybe.discard("s1")
        await node.repository.sweep(0.0)
        await self._commit("s3", node.snapshot("s3", b"base"))

    async def _commit(self, snapshot_id: str, work: Awaitable[object]) -> None:
        self.maybe.add(snapshot_id)
        await work
        self.maybe.discard(snapshot_id)
        self.sure.add(snapshot_id)


async def check(node: Node, story: Story) -> None:
    """After the restart: everything sure, nothing invented, all of it whole; and a sweep leaves exactly that."""
    await node.repository.load()
    found = {snapshot.snapshot_id for snapshot in node.repository.all()}
    assert story.sure <= found <= story.sure | story.maybe
    node.repository.settle()
    await node.repository.sweep(0.0)
    needed: set[str] = set()
    for snapshot in node.repository.all():
        needed |= ids_of(snapshot)
        for layer in {*snapshot.disk.layers, *snapshot.memory.layers}:
            content = (await node.store.get(layer_key(layer))).content
            assert hashlib.sha256(content).hexdigest() == layer
        state = (await node.store.get(state_key(snapshot.device_state))).content
        assert hashlib.sha256(state).hexdigest() == snapshot.device_state
    assert len(await content_ids(node.store) - needed) == len(found)
    assert needed <= await content_ids(node.store)
    # And life goes on.
    await node.snapshot("s9", b"base", b"after")


class CrashingStore:
    """A store whose process is gone at the n-th operation: just before it, or just after."""

    def __init__(self, store: Store, crash_at: int | None = None, *, after: bool = False) -> None:
        self._store = store
        self._crash_at = crash_at
        self._after = after
        self.count = 0

    async def _step(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        self.count += 1
        is_over = self._crash_at is not None and self.count >= self._crash_at
        if is_over and not (self._after and self.count == self._crash_at):
            raise Crash(f"at operation {self.count}")
        result = await operation()
        if is_over:
            raise Crash(f"after operation {self.count}")
        return result

    async def get(self, key: str) -> Object:
        return await self._step(lambda: self._store.get(key))  # type: ignore[no-any-return]

    async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        put = self._store.put
        return await self._step(  # type: ignore[no-any-return]
            lambda: put(key, content, if_absent=if_absent, if_match=if_match)
        )

    async def list(self, folder: str) -> list[Entry]:
        return await self._step(lambda: self._store.list(folder))  # type: ignore[no-any-return]

    async def stat(self, key: str) -> Entry | None:
        return await self._step(lambda: self._store.stat(key))  # type: ignore[no-any-return]

    async def delete(self, key: str) -> None:
        await self._step(lambda: self._store.delete(key))


async def store_run(tmp_path: Path, crash_at: int | None, *, after: bool) -> int:
    memory, story = MemoryStore(), Story()
    crashing = CrashingStore(memory, crash_at, after=after)
    node = Node("node-a", crashing, tmp_path)
    try:
        await node.repository.load()
        await story.tell(node)
    except Crash:
        pass
    await check(Node("node-a", memory, tmp_path), story)
    return crashing.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_at_any_operation_of_the_store(tmp_path: Path, after: bool) -> None:
    count = await store_run(tmp_path, None, after=after)
    assert count > 50
    for number in range(1, count + 1):
        await store_run(tmp_path, number, after=after)


async def file_run(tmp_path: Path, crash_at: int | None, *, names: bool, contents: bool) -> int:
    shutil.rmtree(tmp_path, ignore_errors=True)
    files, story = LossyFiles(tmp_path / "backup", crash_at), Story()
    node_state = tmp_path / "state"
    try:
        node = Node("node-a", PosixStore(tmp_path / "repository", files), node_state)
        await node.repository.load()
        await story.tell(node)
    except Crash:
        files.power_off(lose_names=names, lose_contents=contents)
    store = PosixStore(tmp_path / "repository", Unsynced())
    await check(Node("node-a", store, node_state), story)
    await store.tidy(0.0)
    assert [path for path in (tmp_path / "repository").rglob(".*") if path.is_file()] == []
    return files.count


@pytest.mark.parametrize(
    ("names", "contents"),
    [(False, False), (True, True), (False, True)],
    ids=["process", "power", "power, names kept"],
)
async def test_a_crash_at_any_file_operation(memory_path: Path, names: bool, contents: bool) -> None:
    count = await file_run(memory_path / "w", None, names=names, contents=contents)
    assert count > 80
    for number in range(1, count + 1):
        await file_run(memory_path / "w", number, names=names, contents=contents)


class FullDisk(LossyFiles):
    """Has no room for one write or link; everything else goes on."""

    def __init__(self, backup: Path, full_at: int) -> None:
        super().__init__(backup)
        self._full_at = full_at

    def _step(self) -> None:
        super()._step()
        if self.count == self._full_at:
            raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_at_any_file_operation_is_told_and_harms_nothing(memory_path: Path) -> None:
    count = await file_run(memory_path / "w", None, names=False, contents=False)
    for number in range(1, count + 1):
        shutil.rmtree(memory_path / "w", ignore_errors=True)
        story = Story()
        files = FullDisk(memory_path / "w" / "backup", number)
        node = Node("node-a", PosixStore(memory_path / "w" / "repository", files), memory_path / "w" / "state")
        await node.repository.load()
        with pytest.raises(StorageFull):
            await story.tell(node)
        # The same process goes on.
        node.store = PosixStore(memory_path / "w" / "repository", Unsynced())
        await node.restart()
        await check(node, story)


@pytest.mark.parametrize("unsynced", ["sync", "sync_directory"])
async def test_a_forgotten_sync_is_found(memory_path: Path, monkeypatch: pytest.MonkeyPatch, unsynced: str) -> None:
    """The worlds of this file are worth something: without one kind of sync they fail."""
    monkeypatch.setattr(LossyFiles, unsynced, lambda self, path: self._step())
    count = await file_run(memory_path / "w", None, names=True, contents=True)

    async def everywhere() -> None:
        for number in range(1, count + 1):
            await file_run(memory_path / "w", number, names=True, contents=True)

    with pytest.raises((AssertionError, AenvError)):
        await everywhere()
