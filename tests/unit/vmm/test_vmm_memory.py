"""Finding guest RAM in the text of /proc/PID/maps."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import VmmError
from agentenv.vmm._memory import joined_address

IMAGE = Path("/srv/state dir/mnt/memory/image 1")
MIB = 1 << 20


def line(start: int, end: int, permissions: str = "rw-p", offset: int = 0, path: str = str(IMAGE)) -> str:
    return f"{start:x}-{end:x} {permissions} {offset:08x} 00:2f 7                         {path}\n"


OTHER = line(0x1000, 0x2000, "r-xp", 0, "/usr/bin/qemu") + "7ff000-800000 rw-p 00000000 00:00 0 \n"


def test_one_mapping_is_found_by_its_path() -> None:
    assert joined_address(OTHER + line(0x10000000, 0x10000000 + 4 * MIB), IMAGE, 4 * MIB) == 0x10000000


def test_pieces_that_madvise_split_are_joined() -> None:
    base = 0x7F0000000000
    text = OTHER + line(base, base + MIB) + line(base + MIB, base + 3 * MIB, "rw-p", MIB)
    text += line(base + 3 * MIB, base + 4 * MIB, "---p", 3 * MIB)
    assert joined_address(text, IMAGE, 4 * MIB) == base


def test_the_path_of_an_unlinked_image_still_matches() -> None:
    assert joined_address(line(MIB, 2 * MIB, path=f"{IMAGE} (deleted)"), IMAGE, MIB) == MIB


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OTHER, "is not mapped"),
        (line(MIB, 2 * MIB, path=f"{IMAGE}2"), "is not mapped"),
        (line(MIB, 2 * MIB, "rw-s"), "mapped shared"),
        (line(MIB, 2 * MIB), "1048576 bytes of"),
        (line(MIB, 2 * MIB) + line(3 * MIB, 4 * MIB, offset=MIB), "not contiguous"),
        (line(MIB, 2 * MIB) + line(2 * MIB, 3 * MIB, offset=2 * MIB), "not contiguous"),
        (line(MIB, 3 * MIB, offset=MIB), "not contiguous"),
        (line(MIB, 3 * MIB) + line(9 * MIB, 11 * MIB), "not contiguous"),
    ],
)
def test_anything_but_one_private_range_of_the_whole_image_is_refused(text: str, reason: str) -> None:
    with pytest.raises(VmmError, match=reason):
        joined_address(text, IMAGE, 2 * MIB)
