"""Writing archive members below a local directory and nowhere else, whatever the archive says.

Every directory on the way is opened without following symlinks, relative to the one before it. So a symlink that the
archive brought (they are made as they are, absolute ones too) can never lead a later member out of the directory.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from agentenv.cli import _tar
from agentenv.cli._tar import Member, PieceReader, Report

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


async def unpack(pieces: AsyncIterator[bytes], target: Path, report: Report) -> None:
    """Unpack into `target`, made if missing. Members that cannot be written are reported and skipped.

    Raises `ProtocolError` for a damaged archive, `OSError` when `target` itself cannot be used.
    """
    target.mkdir(exist_ok=True)
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    modes: list[tuple[list[str], int]] = []
    try:
        reader = PieceReader(pieces)
        async for member in _tar.members(reader):
            content = _tar.content(reader, member)
            try:
                await _place(root, member, content, modes)
            except _Refused as error:
                report(member.name, str(error))
            except OSError as error:
                report(member.name, error.strerror or type(error).__name__)
            async for _ in content:
                pass  # what was not written must still leave the stream
        # Last and deepest first: a directory without write permission could not have been filled.
        for parts, mode in reversed(modes):
            with contextlib.suppress(OSError), _opened(root, parts) as descriptor:
                os.fchmod(descriptor, mode)
    finally:
        os.close(root)


class _Refused(Exception):
    """The member's name or kind is not one to be written."""


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise _Refused("refused: the name leads out of the directory")
    return parts


@contextlib.contextmanager
def _opened(root: int, parts: list[str]) -> Iterator[int]:
    """A descriptor of the directory, made if missing."""
    current = os.dup(root)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700 if part != parts[-1] else 0o755, dir_fd=current)
            following = os.open(part, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = following
        yield current
    finally:
        os.close(current)


async def _place(root: int, member: Member, content: AsyncIterator[bytes], modes: list[tuple[list[str], int]]) -> None:
    parts = _parts(member.name)
    if member.kind == tarfile.DIRTYPE:
        with _opened(root, parts):
            if parts:
                modes.append((parts, member.mode))
        return
    if not parts:
        raise _Refused("refused: it has no name")
    with _opened(root, parts[:-1]) as folder:
        if member.kind == tarfile.REGTYPE:
            _remove(parts[-1], folder)
            await _write(parts[-1], folder, member, content)
        elif member.kind == tarfile.SYMTYPE:
            _remove(parts[-1], folder)
            os.symlink(member.link, parts[-1], dir_fd=folder)
        elif member.kind == tarfile.LNKTYPE:
            source = _parts(member.link)
            with _opened(root, source[:-1]) as source_folder:
                _remove(parts[-1], folder)
                os.link(source[-1], parts[-1], src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)
        else:
            raise _Refused("is neither a file, a directory nor a symlink; left out")


def _remove(name: str, folder: int) -> None:
    """Make room, so that an existing symlink or hard link is replaced and never written through."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


async def _write(name: str, folder: int, member: Member, content: AsyncIterator[bytes]) -> None:
    with os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
        async for piece in content:
            file.write(piece)
        file.flush()
        os.fchmod(file.fileno(), member.mode)
        os.utime(file.fileno(), (member.mtime_s, member.mtime_s))
