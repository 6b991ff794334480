"""One copy of a base in the page cache, however many sandboxes use it: counted by the kernel, not inferred.

A disk's export keeps no pages of its own (the guest caches), so all disks share the pages of the layer's file, which
has none before a second disk reads it. A memory image's export does keep them, because VMMs map it, all clones of the
image map the same one, and the layer's file has none.

Counts hold only where memory is not short: a kernel that reclaims makes them smaller, never larger.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
from block_bench import Bench

# Only the real one: the fake has no page cache.
pytestmark = [pytest.mark.host, pytest.mark.parametrize("bench", ["real"], indirect=True)]

MIB: Final = 1 << 20
BASE_BYTES: Final = 24 * MIB
CLONES: Final = 50
# Pages that are not the base's: index blocks of the file, directory entries, what readahead brings of a neighbour.
SLACK_BYTES: Final = MIB

_NR_CACHESTAT: Final = 451  # Linux 6.5 and later; the C library has no wrapper for it yet.
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        whole, stat = _Range(0, 0), _Stat()
        if _LIBC.syscall(_NR_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(stat), 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat", str(path))
        return int(stat.cache) * mmap.PAGESIZE
    finally:
        os.close(descriptor)


def drop_cached(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """A private, writable mapping, as a VMM has its RAM."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, BASE_BYTES, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)
    try:
        yield memory
    finally:
        memory.close()


async def imported(bench: Bench, name: str) -> tuple[Path, bytes]:
    """A sealed layer of `BASE_BYTES` without any zero block, and its content."""
    content = os.urandom(BASE_BYTES)
    raw, layer = bench.files / f"{name}.raw", bench.files / f"{name}.lsmt"
    raw.write_bytes(content)
    await bench.client.import_raw(raw, layer)
    raw.unlink()
    drop_cached(layer)
    assert cached_bytes(layer) <= SLACK_BYTES
    return layer, content


def read_all(path: Path, content: bytes) -> None:
    """Every byte, as a guest reads its disk: past the cache of the exported file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, BASE_BYTES, MIB):
            assert os.pread(descriptor, MIB, at) == content[at : at + MIB]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("clones", [1, CLONES])
async def test_disks_share_one_cached_copy_of_their_base(bench: Bench, clones: int) -> None:
    base, content = await imported(bench, "base")
    disks, uppers = [], []
    for number in range(clones):
        uppers.append(bench.files / f"upper-{number}")
        disks.append(await bench.client.export_disk(f"disk-{number}", BASE_BYTES, [base], uppers[-1]))
    try:
        for disk in disks:
            read_all(disk, content)
        if clones == 1:
            assert cached_bytes(base) <= SLACK_BYTES, "the guest has it"
        else:
            assert BASE_BYTES - SLACK_BYTES <= cached_bytes(base) <= BASE_BYTES + SLACK_BYTES
        assert sum(cached_bytes(disk) for disk in disks) == 0
        # An untouched upper is its header and its map, some pages each.
        assert sum(cached_bytes(upper) for upper in uppers) <= clones * 4 * mmap.PAGESIZE
    finally:
        for number in range(clones):
            await bench.client.unexport(f"disk-{number}")


@pytest.mark.parametrize("clones", [1, CLONES])
async def test_clones_of_a_memory_image_share_one_cached_copy(bench: Bench, clones: int) -> None:
    layer, content = await imported(bench, "memory")
    image = await bench.client.export_memory("memory", BASE_BYTES, [layer])
    try:
        with ExitStack() as machines:
            memories = [machines.enter_context(mapped(image)) for _ in range(clones)]
            for memory in memories:
                assert memory[:] == content
            assert 0 < cached_bytes(image) <= BASE_BYTES
            # What one clone writes is its own and no page of the image.
            memories[0][: 4 * MIB] = bytes(4 * MIB)
            assert cached_bytes(image) <= BASE_BYTES
            assert cached_bytes(layer) <= SLACK_BYTES, "blockd read it past the cache"
    finally:
        await bench.client.unexport("memory")
