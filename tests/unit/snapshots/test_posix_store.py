"""What only a directory has: locks of conditional puts, hidden files, files that cannot be what they should."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import OperationFailed, StorageFull, StoreUnavailable
from agentenv.snapshots.stores import PosixStore, PreconditionFailed
from agentenv.snapshots.stores import posix as posix_module
from agentenv.snapshots.stores.files import Files
from agentenv.snapshots.stores.posix import LOCK_STALE_S, LOCK_WAIT_S_MAX, LOCK_WORK_S_MAX


class Time:
    """A clock that sleeping moves; `meanwhile` happens while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.meanwhile: Callable[[], None] = lambda: None
        monkeypatch.setattr(posix_module.time, "sleep", self._sleep)

    def _sleep(self, _: float) -> None:
        self.now_s += 1.0
        self.meanwhile()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, clock: Time) -> PosixStore:
    return PosixStore(tmp_path, monotonic=clock)


def lock_of(store: PosixStore) -> Path:
    return store.root / "gc" / ".lock.json.lock"


async def test_a_dead_holders_lock_is_broken_when_it_is_stale(store: PosixStore, clock: Time) -> None:
    etag = await store.put("gc/lock.json", b"1")
    lock_of(store).write_bytes(b"dead")
    began = clock()
    await store.put("gc/lock.json", b"2", if_match=etag)
    assert LOCK_STALE_S < clock() - began < LOCK_STALE_S + 5
    assert sorted(os.listdir(store.root / "gc")) == ["lock.json"]


async def test_a_lock_that_changes_hands_is_waited_for_and_never_broken(store: PosixStore, clock: Time) -> None:
    etag = await store.put("gc/lock.json", b"1")
    lock_of(store).write_bytes(b"somebody")
    clock.meanwhile = lambda: lock_of(store).write_bytes(str(clock.now_s // 10).encode()) and None
    began = clock()
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.put("gc/lock.json", b"2", if_match=etag)
    assert LOCK_WAIT_S_MAX <= clock() - began < LOCK_WAIT_S_MAX + 5
    assert lock_of(store).exists()
    assert (await store.get("gc/lock.json")).content == b"1"


async def test_a_breaker_that_is_late_puts_the_successors_lock_back(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "gc").mkdir()
    lock_of(store).write_bytes(b"successor")
    store._break(lock_of(store), b"stale")
    assert lock_of(store).read_bytes() == b"successor"
    store._break(lock_of(store), b"successor")
    assert os.listdir(tmp_path / "gc") == []


async def test_a_holder_that_is_too_slow_gives_up(
    store: PosixStore, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    etag = await store.put("gc/lock.json", b"1")
    read = PosixStore._content

    def slow(path: Path) -> bytes | None:
        clock.now_s += LOCK_WORK_S_MAX + 1
        return read(path)

    monkeypatch.setattr(PosixStore, "_content", staticmethod(slow))
    with pytest.raises(StoreUnavailable, match="too long"):
        await store.put("gc/lock.json", b"2", if_match=etag)
    assert (await store.get("gc/lock.json")).content == b"1"
    assert not lock_of(store).exists()


def test_of_many_processes_that_replace_one_wins_each_round(tmp_path: Path) -> None:
    """Threads with stores of their own, without what one store in one process could lean on."""
    rounds, etags = 20, [PosixStore(tmp_path)._put("gc/lock.json", b"start", False, None)]
    wins: list[int] = []

    def contend(number: int, barrier: threading.Barrier) -> None:
        store = PosixStore(tmp_path)
        for turn in range(rounds):
            barrier.wait()
            try:
                etag = store._put("gc/lock.json", b"%d %d" % (number, turn), False, etags[turn])
            except PreconditionFailed:
                pass
            else:
                wins.append(turn)
                etags.append(etag)
            barrier.wait()

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=contend, args=(number, barrier)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wins == list(range(rounds))


async def test_hidden_files_are_not_listed_and_go_when_they_are_old(store: PosixStore) -> None:
    await store.put("layers/a.lsmt", b"1")
    old, young = store.root / "layers" / ".b.lsmt.0a", store.root / "layers" / ".c.lsmt.0b"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (1.0, 1.0))
    assert [entry.key for entry in await store.list("layers/")] == ["layers/a.lsmt"]
    assert await store.tidy(3_600.0) == 1
    assert sorted(os.listdir(store.root / "layers")) == [".c.lsmt.0b", "a.lsmt"]


async def test_a_sparse_file_takes_what_it_takes(store: PosixStore, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with local.open("wb") as file:
        file.truncate(1 << 30)
        file.write(b"x")
    assert await store.adopt(local, "layers/a.lsmt")
    (entry,) = await store.list("layers/")
    assert entry.size_bytes == 1 << 30
    assert entry.stored_bytes < 1 << 20
    assert not await store.adopt(local, "layers/a.lsmt")


@pytest.mark.parametrize(("number", "expected"), [(28, StorageFull), (116, StoreUnavailable), (5, OperationFailed)])
async def test_errors_of_the_file_system_are_ours(tmp_path: Path, number: int, expected: type[Exception]) -> None:
    class Broken(Files):
        def write(self, path: Path, content: bytes) -> None:
            raise OSError(number, os.strerror(number))

    with pytest.raises(expected) as caught:
        await PosixStore(tmp_path, Broken()).put("layers/a.lsmt", b"1")
    assert type(caught.value) is expected


async def test_what_is_in_the_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "layers").write_bytes(b"a file")
    with pytest.raises(OperationFailed, match="layers"):
        await PosixStore(tmp_path).put("layers/a.lsmt", b"1")
    with pytest.raises(OperationFailed, match="layers"):
        await PosixStore(tmp_path).list("layers/")
