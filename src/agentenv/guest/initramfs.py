"""Writes the guest's initramfs: the guest daemon as /init, its kernel modules, and nothing else.

The archive is `newc` cpio (what the kernel unpacks), uncompressed: under an emulated CPU decompression costs more
than reading the bytes. The same input gives the same bytes, so that the
hash of an initramfs names it: numbers, owners and times are constants and entries are sorted.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

_TRAILER = "TRAILER!!!"
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One archive member. `mode` has the type bits; `device` is (major, minor) of a device node."""

    path: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def build_initramfs(init: Path, modules: Path) -> bytes:
    """The archive with `init` as /init and the files of `modules` (*.ko and order) as /modules."""
    entries = [
        Entry("dev", stat.S_IFDIR | 0o755),
        # The kernel opens it for PID 1 before anything is mounted; without it the daemon starts with no stdio at all.
        Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)),
        Entry("init", stat.S_IFREG | 0o755, init.read_bytes()),
        Entry("modules", stat.S_IFDIR | 0o755),
        *(Entry(f"modules/{f.name}", stat.S_IFREG | 0o644, f.read_bytes()) for f in sorted(modules.iterdir())),
        Entry("proc", stat.S_IFDIR | 0o555),
        Entry("sys", stat.S_IFDIR | 0o555),
    ]
    return write_cpio(entries)


def write_cpio(entries: list[Entry]) -> bytes:
    """Serialise entries, parents first, in the order given."""
    parts = [_member(number, entry) for number, entry in enumerate(entries, start=1)]
    archive = b"".join(parts) + _member(0, Entry(_TRAILER, 0))
    return archive + b"\0" * (-len(archive) % _BLOCK)


def _member(inode: int, entry: Entry) -> bytes:
    """`070701` and thirteen 8-digit hexadecimal fields, then name and content, each padded to four bytes."""
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.content), 0, 0, *entry.device, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + name
    return _padded(header) + _padded(entry.content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
