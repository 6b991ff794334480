"""Layers that hold every feature of archives that images use, one case each.

Owns: the cases and how to write them down. A case is the list of its layers, each the bytes of an archive.
"""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Layers = list[bytes]
Case = Callable[[Path], Layers]

CASES: dict[str, Case] = {}


def _case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Layer:
    """One archive under construction. Times are set, so that no clock decides."""

    def __init__(self, tar_format: int = tarfile.PAX_FORMAT) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._buffer, mode="w", format=tar_format, encoding="utf-8")

    def add(self, name: str, kind: bytes, data: bytes | None = None, **fields: Any) -> Layer:
        """Any entry; `fields` are those of `TarInfo`."""
        member = tarfile.TarInfo(name)
        member.type = kind
        member.mtime = 1_600_000_000
        member.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        for field, value in fields.items():
            setattr(member, field, value)
        if data is not None:
            member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data) if data is not None else None)
        return self

    def file(self, name: str, data: bytes = b"", **fields: Any) -> Layer:
        return self.add(name, tarfile.REGTYPE, data, **fields)

    def folder(self, name: str, **fields: Any) -> Layer:
        return self.add(name, tarfile.DIRTYPE, **fields)

    def symlink(self, name: str, target: str, **fields: Any) -> Layer:
        return self.add(name, tarfile.SYMTYPE, linkname=target, **fields)

    def hard_link(self, name: str, target: str) -> Layer:
        return self.add(name, tarfile.LNKTYPE, linkname=target)

    def bytes(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()


def _xattrs(**values: bytes) -> dict[str, str]:
    return {
        f"SCHILY.xattr.{name.replace('__', '.')}": value.decode("utf-8", "surrogateescape")
        for name, value in values.items()
    }


@_case
def files_of_all_sizes(_: Path) -> Layers:
    layer = Layer().folder("d")
    for size in (0, 1, 511, 512, 513, 4095, 4096, 4097, 1 << 20, (5 << 20) + 3):
        layer.file(f"d/{size}", random.Random(size).randbytes(size))
    return [layer.bytes()]


@_case
def modes_and_owners(_: Path) -> Layers:
    layer = Layer().folder("d", mode=0o3777, uid=1, gid=2)
    for number, mode in enumerate((0, 0o777, 0o4755, 0o2755, 0o1644, 0o6711)):
        layer.file(f"d/{number}", b"x", mode=mode, uid=number * 70_000, gid=4_000_000_000 + number)
    layer.symlink("d/link", "0", mode=0o644, uid=1000, gid=100_000)
    return [layer.bytes()]


@_case
def whiteouts(_: Path) -> Layers:
    lower = Layer().folder("a").folder("a/b").file("a/b/c", b"1").file("a/d", b"1").file("e", b"1").symlink("f", "a")
    upper = Layer().file("a/.wh.b").file(".wh.f").folder("a").file("a/new", b"2").file(".wh.not-there").file("e", b"2")
    return [lower.bytes(), upper.bytes(), Layer().file(".wh.a").file(".wh.e").bytes()]


@_case
def opaque_folders(_: Path) -> Layers:
    lower = Layer().folder("a").folder("a/b").file("a/b/old", b"1").file("a/old", b"1").file("keep", b"1")
    before = Layer().folder("a").file("a/.wh..wh..opq").folder("a/b").file("a/b/new", b"2")
    after = Layer().folder("a").folder("a/b").file("a/b/third", b"3").file("a/.wh..wh..opq")
    return [lower.bytes(), before.bytes(), after.bytes()]


@_case
def types_that_change(_: Path) -> Layers:
    lower = Layer()
    for number in range(4):
        lower.file(f"file{number}", b"1").folder(f"folder{number}").file(f"folder{number}/in", b"1")
        lower.symlink(f"link{number}", f"folder{number}").add(f"fifo{number}", tarfile.FIFOTYPE)
    upper = Layer()
    for name in ("file", "folder", "link", "fifo"):
        upper.folder(f"{name}0").file(f"{name}0/new", b"2").file(f"{name}1", b"2")
        upper.symlink(f"{name}2", "file1").add(f"{name}3", tarfile.FIFOTYPE, mode=0o600)
    return [lower.bytes(), upper.bytes()]


@_case
def hard_links(_: Path) -> Layers:
    lower = Layer().file("one", b"content", mode=0o600).hard_link("two", "one").folder("d").hard_link("d/three", "/two")
    lower.symlink("symlink", "one").hard_link("link-to-symlink", "symlink")
    second = Layer().hard_link("four", "one").file(".wh.two").file("one", b"other")
    third = Layer().hard_link("d/five", "./d/../four").file(".wh.d").hard_link("six", "four")
    return [lower.bytes(), second.bytes(), third.bytes()]


@_case
def extended_attributes(_: Path) -> Layers:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    acl = bytes.fromhex("02000000 01000600ffffffff 02000400e8030000 04000400ffffffff 10000400ffffffff 20000000ffffffff")
    values = _xattrs(user__name=b"v\nx=\xff\x01", trusted__t=b"t", security__capability=capability)
    many = {f"SCHILY.xattr.user.{number:02}": "x" * 100 for number in range(20)}
    layer = Layer().folder("d", pax_headers=_xattrs(user__on_folder=b"1", trusted__other=b"2"))
    layer.file("d/file", b"x", pax_headers=values).file("d/many", b"x" * 5000, pax_headers=many)
    layer.file("d/empty", b"", pax_headers=_xattrs(user__empty=b""))
    layer.file("d/acl", b"x", mode=0o640, pax_headers=_xattrs(system__posix_acl_access=acl))
    layer.symlink("d/link", "file", pax_headers=_xattrs(trusted__on_link=b"l"))
    upper = Layer().folder("d", pax_headers=_xattrs(user__replaced=b"2")).file("d/many", b"y")
    return [layer.bytes(), upper.bytes()]


@_case
def devices_and_fifos(_: Path) -> Layers:
    layer = Layer().folder("dev")
    for number, (major, minor) in enumerate(((1, 3), (0, 0), (255, 255), (256, 1), (4095, 1_048_575))):
        layer.add(f"dev/char{number}", tarfile.CHRTYPE, devmajor=major, devminor=minor, mode=0o666)
        layer.add(f"dev/block{number}", tarfile.BLKTYPE, devmajor=major, devminor=minor, mode=0o660, gid=6)
    return [layer.add("dev/fifo", tarfile.FIFOTYPE, mode=0o620).bytes()]


@_case
def long_names(_: Path) -> Layers:
    layers = []
    for tar_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        name = f"{tar_format}"
        layer = Layer(tar_format).folder(name)
        deep = name
        for letter in "abcdefgh":
            deep = f"{deep}/{letter * 120}"
            layer.folder(deep)
        layer.file(f"{deep}/{'n' * 255}", b"deep").symlink(f"{name}/long-link", "t/" * 1000 + "t")
        layer.symlink(f"{name}/59", "x" * 59).symlink(f"{name}/60", "x" * 60)
        layer.hard_link(f"{name}/hard", f"{deep}/{'n' * 255}").file(f"{name}/\u00e4\u20ac \n", b"utf-8")
        layers.append(layer.bytes())
    return layers


@_case
def times(_: Path) -> Layers:
    layer = Layer().folder("d", mtime=1.5)
    for time in ("0", "1", "-1", "-1.25", "2147483648", "4294967296.5", "1700000000.123456789"):
        layer.file(f"d/{time}", b"x", mtime=float(time), pax_headers={"mtime": time})
    return [layer.symlink("d/link", "x", pax_headers={"mtime": "99.000000001"}).bytes()]


@_case
def old_formats(_: Path) -> Layers:
    ustar = Layer(tarfile.USTAR_FORMAT).folder("p" * 90).folder("p" * 90 + "/" + "q" * 60)
    ustar.file("p" * 90 + "/" + "q" * 60 + "/" + "r" * 90, b"prefix")
    gnu = Layer(tarfile.GNU_FORMAT).file("large-owner", b"x", uid=3_000_000, gid=4_000_000_000)
    oldest = Layer(tarfile.USTAR_FORMAT).add("v7/", tarfile.AREGTYPE).add("v7/file", tarfile.AREGTYPE, b"old")
    return [ustar.bytes(), gnu.bytes(), oldest.bytes()]


@_case
def hostile_paths(_: Path) -> Layers:
    layer = Layer().folder("./a/").file("../../outside", b"1").file("/absolute", b"1").file("a/../../b/./c", b"1")
    layer.symlink("up", "../../..").file("up/through-up", b"1").symlink("abs", "/a").file("abs/through-abs", b"1")
    layer.symlink("dangling", "not/there").file("dangling/made", b"1").symlink("chain", "abs/../abs")
    upper = Layer().file("chain/through-chain", b"2").file("up/.wh.absolute").hard_link("abs/hard", "up/outside")
    return [layer.bytes(), upper.bytes()]


@_case
def entries_that_repeat(_: Path) -> Layers:
    layer = Layer().folder("d", mode=0o700).file("d/f", b"1").folder("d", mode=0o711).file("d/f", b"second" * 1000)
    return [layer.file("e", b"1").folder("e").folder("./", mode=0o750).bytes()]


@_case
def a_large_folder(_: Path) -> Layers:
    layer = Layer().folder("d")
    for number in range(10_000):
        layer.file(f"d/a name of usual length {number}", b"")
    upper = Layer()
    for number in range(0, 10_000, 3):
        upper.file(f"d/.wh.a name of usual length {number}")
    return [layer.bytes(), upper.bytes()]


@_case
def sparse_files(scratch: Path) -> Layers:
    """GNU tar's own, in the three formats that umoci reads."""
    return [sparse_archive(scratch, "posix", f"--sparse-version={version}") for version in ("0.0", "0.1", "1.0")]


def sparse_archive(scratch: Path, tar_format: str, *options: str) -> bytes:
    """The same files every time, whatever the format."""
    folder = scratch / "sparse"
    folder.mkdir(exist_ok=True)
    for name, size, pieces in (
        ("holes", 5_000_000, (0, 100_000, 4_000_000)),
        ("end", 3_000_001, (10,)),
        ("many", 4_000_000, tuple(range(0, 4_000_000, 131_072))),
        ("empty", 1_000_000, ()),
    ):
        with (folder / name).open("wb") as file:
            file.truncate(size)
            for offset in pieces:
                file.seek(offset)
                file.write(b"data" * 1500)
            file.truncate(size)
    tar = ["tar", "--sparse", "--owner=0", "--group=0", "--mtime=@1600000000", "-C", str(scratch), "-c"]
    done = subprocess.run([*tar, f"--format={tar_format}", *options, "sparse"], check=True, capture_output=True)
    return done.stdout
