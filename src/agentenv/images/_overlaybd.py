"""What has to be known of an overlaybd layer before blockd opens it, read from the first bytes of the stored layer.

Owns no format: `crates/layers` does (spec/layers.md). This reads two things of it: the size of the disk, which is in
the header of LSMT, which may lie in the first block of a ZFile, which may lie in a tar; and whether blocks have
checksums.
"""

from __future__ import annotations

import struct
import subprocess
from typing import Final

from agentenv.errors import ImageError

# More than one block of a ZFile (64 KiB at most) behind its header and a tar's.
HEAD_BYTES: Final = 80 << 10
# Enough to tell the form, where no large extended header stands before it.
FORM_BYTES: Final = 4 << 10
_TAR_BLOCK: Final = 512
_TAR_MAGIC_AT: Final = 257
_ZFILE_MAGIC: Final = b"ZFile\0\1"
_ZFILE_HEADER_BYTES: Final = 512
_ZFILE_CHECKED_AT: Final = 88
_LSMT_MAGIC: Final = b"LSMT\0\1\2\0"
_VIRTUAL_SIZE_AT: Final = 48
# What is needed of the header.
_HEADER_BYTES: Final = _VIRTUAL_SIZE_AT + 8
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_UNPACK_S_MAX: Final = 20.0


def virtual_size(head: bytes, origin: str) -> int:
    """Bytes of the disk, from the first `HEAD_BYTES` of a layer. Raises `ImageError` naming `origin`.

    Blocking (a process, where the layer is packed with zstd): call it from a thread.
    """
    content = _behind_tar(head)
    if content.startswith(_ZFILE_MAGIC):
        content = _first_block(content[_ZFILE_HEADER_BYTES:], origin)
    if len(content) < _HEADER_BYTES or not content.startswith(_LSMT_MAGIC):
        raise ImageError(f"{origin}: no overlaybd layer")
    (size,) = struct.unpack_from("<Q", content, _VIRTUAL_SIZE_AT)
    if size == 0 or size % 512:
        raise ImageError(f"{origin}: the layer does not say how large its disk is")
    return int(size)


def has_checksums(head: bytes) -> bool:
    """Whether every block of the layer can be verified by itself: a ZFile with checksums, perhaps in a tar.

    `head` are its first `FORM_BYTES`, or fewer where it is shorter. What cannot be told from them is no.
    """
    content = _behind_tar(head)
    return content.startswith(_ZFILE_MAGIC) and content[_ZFILE_CHECKED_AT : _ZFILE_CHECKED_AT + 1] not in (b"", b"\0")


def _behind_tar(head: bytes) -> bytes:
    """The content of the tar's first regular member. Extended headers may stand before it."""
    at = 0
    while head[at + _TAR_MAGIC_AT : at + _TAR_MAGIC_AT + 5] == b"ustar":
        kind, size = head[at + 156 : at + 157], _octal(head[at + 124 : at + 136])
        at += _TAR_BLOCK
        if kind in (b"0", b"\0"):
            return head[at:]
        at += (size + _TAR_BLOCK - 1) // _TAR_BLOCK * _TAR_BLOCK
    return head[at:]


def _octal(field: bytes) -> int:
    """0 for sizes in another notation: no extended header is that large."""
    text = field.strip(b"\0 ")
    return int(text, 8) if text and all(48 <= digit < 56 for digit in text) else 0


def _first_block(packed: bytes, origin: str) -> bytes:
    if not packed.startswith(_ZSTD_MAGIC):
        # A block that did not shrink is stored as it is.
        return packed[:_HEADER_BYTES] if packed.startswith(_LSMT_MAGIC) else _lz4_beginning(packed, origin)
    command = ["zstd", "-dcq"]
    try:
        # What follows the first frame is no frame; only the output counts.
        done = subprocess.run(command, input=packed, capture_output=True, timeout=_UNPACK_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"{origin}: cannot be unpacked: {error}") from error
    return done.stdout


def _lz4_beginning(packed: bytes, origin: str) -> bytes:
    """The first bytes of an LZ4 block: literals and copies of what came before, until there are enough."""
    out, at = bytearray(), 0
    try:
        while len(out) < _HEADER_BYTES:
            token = packed[at]
            literals, at = _length(packed, at + 1, token >> 4)
            out += packed[at : at + literals]
            at += literals
            if len(out) >= _HEADER_BYTES:
                break
            distance = packed[at] | packed[at + 1] << 8
            copies, at = _length(packed, at + 2, token & 15)
            if not 0 < distance <= len(out):
                raise ImageError(f"{origin}: its first block is damaged")
            for _ in range(min(copies + 4, _HEADER_BYTES)):
                out.append(out[-distance])
    except IndexError as error:
        raise ImageError(f"{origin}: its first block is damaged") from error
    return bytes(out)


def _length(packed: bytes, at: int, nibble: int) -> tuple[int, int]:
    if nibble < 15:
        return nibble, at
    length = nibble
    while True:
        length += packed[at]
        at += 1
        if packed[at - 1] != 255:
            return length, at
