"""Finds guest RAM in a VMM's address space. Owns the reading of /proc/PID/maps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import VmmError, VmmGone
from agentenv.vmm._process import WatchedProcess
from agentenv.vmm.driver import MemoryMapping


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    end: int
    permissions: str
    offset: int


def find_mapping(process: WatchedProcess, image: Path, length_bytes: int) -> MemoryMapping:
    """Where `image` is mapped, as one range. Raises `VmmGone`, or `VmmError` when it is not mapped as expected.

    The kernel splits a mapping at every madvise or mprotect of a part of it; the pieces must join to the whole image,
    in order and without a gap, and be private: else a capture would read something else than the guest's memory.
    """
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="surrogateescape")
    except OSError as error:
        raise VmmGone(f"process {process.pid} no longer exists") from error
    if not maps or not process.alive():
        raise VmmGone(f"process {process.pid} no longer exists")
    return MemoryMapping(process.pid, joined_address(maps, image, length_bytes), length_bytes)


def joined_address(maps: str, image: Path, length_bytes: int) -> int:
    """The address at which the pieces of `image` in the text of /proc/PID/maps form one private range."""
    pieces = [piece for line in maps.splitlines() if (piece := _piece_of(line, str(image)))]
    if not pieces:
        raise VmmError(f"the memory image {image} is not mapped")
    start, expected_offset = pieces[0].start, 0
    for piece in pieces:
        if piece.offset != expected_offset or piece.start != start + expected_offset:
            raise VmmError(f"the mapping of {image} is not contiguous at offset {expected_offset}")
        if piece.permissions[3] != "p":
            raise VmmError(f"the memory image {image} is mapped shared: the guest would write into it")
        expected_offset += piece.end - piece.start
    if expected_offset != length_bytes:
        raise VmmError(f"{expected_offset} bytes of {image} are mapped, the machine has {length_bytes}")
    return start


def _piece_of(line: str, path: str) -> _Piece | None:
    """`START-END PERMS OFFSET DEV INODE PATH`; a path may hold spaces and, when unlinked, ends in " (deleted)"."""
    fields = line.split(maxsplit=5)
    # Only a newline is escaped in this file.
    if len(fields) < 6 or fields[5].replace("\\012", "\n").removesuffix(" (deleted)") != path:
        return None
    start, _, end = fields[0].partition("-")
    return _Piece(int(start, 16), int(end, 16), fields[1], int(fields[2], 16))
