"""Plain files with holes: copying them, measuring them, hashing them without reading what is not there.

Owns what the fake's "layers" are on disk. Knows nothing of layers or exports.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

_PIECE_BYTES: Final = 1 << 20


def copy_sparse(source: str | None, into: Path, size_bytes: int) -> None:
    """A copy that keeps holes: images are large and mostly empty."""
    with into.open("wb") as target:
        target.truncate(size_bytes)
        if source is None:
            return
        with Path(source).open("rb") as origin:
            for start, end in data_ranges(origin.fileno()):
                origin.seek(start)
                target.seek(start)
                left = end - start
                while left > 0:
                    piece = origin.read(min(left, _PIECE_BYTES))
                    target.write(piece)
                    left -= len(piece)


def data_ranges(descriptor: int) -> list[tuple[int, int]]:
    """Start and end of each run of bytes that the file really holds."""
    ranges: list[tuple[int, int]] = []
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:
            return ranges
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        ranges.append((start, end))


def data_bytes(path: Path) -> int:
    """Bytes that the file really holds."""
    with path.open("rb") as file:
        return sum(end - start for start, end in data_ranges(file.fileno()))


def digest(path: Path) -> tuple[str, bool]:
    """A digest by content (hex), and whether the file has holes.

    Without holes it is the sha256 of the file. With holes it is one of the places and bytes of what is not zero, so
    that an empty image of a GiB costs nothing.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        ranges = data_ranges(file.fileno())
        if ranges == [(0, size_bytes)]:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest(), False
        digested = hashlib.sha256(b"with holes %d" % size_bytes)
        for start, end in ranges:
            file.seek(start)
            for offset in range(start, end, _PIECE_BYTES):
                piece = file.read(min(end - offset, _PIECE_BYTES))
                if piece.strip(b"\0"):
                    digested.update(b"%d" % offset + piece)
        return digested.hexdigest(), True
