"""What two unpackers made of the same layers, as records that can be compared.

Owns: reading a folder that umoci unpacked, and reading the archive that `aenv-image dump` writes. A file is one record
under each of its paths; the paths of one file are a part of the record, so that hard links are compared too.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections import defaultdict
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import IO

_XATTR = "SCHILY.xattr."
# e2fsck's folder is there from the start; the host's label is put on every file by a host that has such labels.
_LOST_AND_FOUND = "lost+found"
_HOST_XATTRS = {"security.selinux"}


@dataclass(frozen=True)
class Record:
    """One path of a tree. `content` is a digest, a link's target or a device's numbers."""

    kind: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int | None
    content: str
    xattrs: tuple[tuple[str, bytes], ...]
    same_as: tuple[str, ...] = ()


Tree = dict[str, Record]


def folder_tree(root: Path) -> Tree:
    """The tree of a folder, as root sees it."""
    paths: dict[int, list[str]] = defaultdict(list)
    tree: Tree = {}
    todo = [root]
    while todo:
        for entry in os.scandir(todo.pop()):
            path = os.path.relpath(entry.path, root)
            status = entry.stat(follow_symlinks=False)
            tree[path] = _file_record(entry.path, status)
            if stat.S_ISDIR(status.st_mode):
                todo.append(Path(entry.path))
            else:
                paths[status.st_ino].append(path)
    return _with_links(tree, list(paths.values()))


def _file_record(path: str, status: os.stat_result) -> Record:
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name not in _HOST_XATTRS]
    xattrs = tuple(sorted((name, os.getxattr(path, name, follow_symlinks=False)) for name in names))
    kind, content = _kind_and_content(path, status)
    mode = stat.S_IMODE(status.st_mode)
    return Record(kind, mode, status.st_uid, status.st_gid, status.st_mtime_ns, content, xattrs)


def _kind_and_content(path: str, status: os.stat_result) -> tuple[str, str]:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        with open(path, "rb") as file:
            return "file", f"{status.st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    if stat.S_ISLNK(mode):
        return "symlink", os.readlink(path)
    if stat.S_ISDIR(mode):
        return "directory", ""
    if stat.S_ISFIFO(mode):
        return "fifo", ""
    kind = "char" if stat.S_ISCHR(mode) else "block"
    return kind, f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def archive_tree(archive: IO[bytes]) -> Tree:
    """The tree that an archive describes, its hard links resolved."""
    tree: Tree = {}
    links: dict[str, list[str]] = {}
    with tarfile.open(fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape") as reader:
        for member in reader:
            path = member.name.removeprefix("./").strip("/")
            if path in ("", ".", _LOST_AND_FOUND):
                continue
            if member.islnk():
                links.setdefault(member.linkname, [member.linkname]).append(path)
                tree[path] = tree[member.linkname]
            else:
                tree[path] = _member_record(reader, member)
    return _with_links(tree, list(links.values()))


def _member_record(reader: tarfile.TarFile, member: tarfile.TarInfo) -> Record:
    kinds = {
        tarfile.REGTYPE: "file",
        tarfile.SYMTYPE: "symlink",
        tarfile.DIRTYPE: "directory",
        tarfile.FIFOTYPE: "fifo",
        tarfile.CHRTYPE: "char",
        tarfile.BLKTYPE: "block",
    }
    kind = kinds[member.type]
    content = ""
    if kind == "file":
        file = reader.extractfile(member)
        assert file is not None
        # Not by file_digest: a member of a stream has no descriptor.
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        content = f"{member.size} {digest.hexdigest()}"
    elif kind == "symlink":
        content = member.linkname
    elif kind in ("char", "block"):
        content = f"{member.devmajor}:{member.devminor}"
    headers = member.pax_headers
    xattrs = (
        (name.removeprefix(_XATTR), value.encode("utf-8", "surrogateescape"))
        for name, value in headers.items()
        if name.startswith(_XATTR)
    )
    # A float would lose the nanoseconds.
    mtime_ns = int(Decimal(headers.get("mtime", str(member.mtime))) * 10**9)
    return Record(kind, member.mode, member.uid, member.gid, mtime_ns, content, tuple(sorted(xattrs)))


def _with_links(tree: Tree, groups: list[list[str]]) -> Tree:
    for group in groups:
        if len(group) > 1:
            for path in group:
                tree[path] = replace(tree[path], same_as=tuple(sorted(group)))
    return tree


def without_times(tree: Tree, paths: set[str]) -> Tree:
    """The tree without the times of these paths: an unpacker dates folders that no layer names as it likes."""
    return {path: replace(record, mtime_ns=None) if path in paths else record for path, record in tree.items()}
