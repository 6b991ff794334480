"""The one number that is read of an overlaybd layer, in every wrapping that upstream writes."""

from __future__ import annotations

import io
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ImageError
from agentenv.images._overlaybd import FORM_BYTES, has_checksums, virtual_size

SIZE = 64 << 30
GOLDEN = Path(__file__).parents[3] / "spec" / "layers"
HEADER = struct.pack("<8s16sIIQQQ", b"LSMT\0\1\2\0", b"\x65\x7e" * 8, 390, 7, 0, 0, SIZE).ljust(4096, b"\0")
ZFILE = b"ZFile\0\1".ljust(512, b"\0")
# An LZ4 block as its encoder makes it: 58 literals (15 + 43), then zeros copied from one byte before.
LZ4 = bytes([0xFF, 43]) + HEADER[:58] + bytes([1, 0]) + b"\xff" * 15 + b"\x40"


def in_tar(content: bytes, kind: int = tarfile.PAX_FORMAT, name: str = "overlaybd.commit") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zstd(content: bytes) -> bytes:
    return subprocess.run(["zstd", "-qc"], input=content, capture_output=True, check=True, timeout=60).stdout


WRAPPED = {
    "plain": HEADER,
    "tar": in_tar(HEADER),
    "tar with a long name": in_tar(HEADER, name="x" * 200),
    "gnu tar with a long name": in_tar(HEADER, tarfile.GNU_FORMAT, "x" * 200),
    "zfile, stored": ZFILE + HEADER,
    "zfile, lz4": ZFILE + LZ4 + b"more",
    "tar, zfile, lz4": in_tar(ZFILE + LZ4),
}


@pytest.mark.parametrize("content", WRAPPED.values(), ids=WRAPPED)
def test_the_size_is_found(content: bytes) -> None:
    assert virtual_size(content, "it") == SIZE


def test_the_size_is_found_behind_zstd() -> None:
    assert virtual_size(in_tar(ZFILE + zstd(HEADER) + b"the next block"), "it") == SIZE


def checked_zfile(flag: bytes = b"\1") -> bytes:
    return ZFILE[:88] + flag + ZFILE[89:] + LZ4


@pytest.mark.parametrize(
    "content",
    [checked_zfile(), checked_zfile(b"\xff"), in_tar(checked_zfile()), in_tar(checked_zfile(), name="x" * 200)],
)
def test_a_zfile_with_checksums_can_be_verified_by_its_blocks(content: bytes) -> None:
    assert has_checksums(content.ljust(FORM_BYTES * 2, b"x")[:FORM_BYTES])


@pytest.mark.parametrize(
    "content",
    [
        *WRAPPED.values(),
        HEADER[:88].ljust(600, b"\1"),
        checked_zfile()[:88],
        in_tar(checked_zfile(b"\0")),
        b"",
        in_tar(checked_zfile())[:590],
    ],
)
def test_whatever_else_cannot(content: bytes) -> None:
    assert not has_checksums(content[:FORM_BYTES])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 9000,
        in_tar(b"hello"),
        HEADER[:20],
        ZFILE,
        ZFILE + LZ4[:30],
        ZFILE + b"\x10a\x09\x00",
        HEADER[:48] + bytes(8),
    ],
)
def test_what_is_no_layer_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(ImageError, match="it: "):
        virtual_size(content, "it")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    for tried in (content, ZFILE + content, b"LSMT\0\1\2\0" + content):
        try:
            has_checksums(tried)
            virtual_size(tried, "it")
        except ImageError:
            continue


def test_the_golden_files_are_told_apart() -> None:
    """spec/layers.md says of each what it is; upstream's reader agrees."""
    files = [path for path in GOLDEN.iterdir() if path.suffix in (".lsmt", ".zfile", ".tar")]
    checked = {path.name for path in files if has_checksums(path.read_bytes()[:FORM_BYTES])}
    packed = {path.name for path in files if path.suffix == ".zfile"}
    assert len(packed) > 1
    assert checked == packed - {"base-lz4-unchecked.zfile"} | {"base-lz4-4k.tar"}
