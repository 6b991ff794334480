"""File operations on a host that may crash before any of them, and whose power may go.

Nothing is really synced: what would be is written down, and `power_off` takes away what was not. The names of a
directory are as of its last sync (or as they are: a file system is free to), contents of files that were never synced
are empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentenv.snapshots.stores.files import Files


class Crash(BaseException):
    """The process is gone. No handler of errors may see it as one."""


class Unsynced(Files):
    """The real ones without waiting for a disk."""

    def sync(self, path: Path) -> None:
        assert path.exists()

    def sync_directory(self, path: Path) -> None:
        assert path.is_dir()


@dataclass(frozen=True, slots=True)
class _Undo:
    directory: Path
    undo: Callable[[], None]


class LossyFiles(Files):
    """Counts operations; from the `crash_at`-th on (1 is the first) every one raises `Crash` instead of being done."""

    def __init__(self, backup: Path, crash_at: int | None = None) -> None:
        backup.mkdir(parents=True, exist_ok=True)
        self._backup = backup
        self._crash_at = crash_at
        self.count = 0
        self._synced: set[int] = set()
        self._written: dict[int, Path] = {}
        self._undos: list[_Undo] = []

    def write(self, path: Path, content: bytes) -> None:
        self._step()
        super().write(path, content)
        self._made(path)

    def sync(self, path: Path) -> None:
        self._step()
        self._synced.add(path.stat().st_ino)

    def sync_directory(self, path: Path) -> None:
        self._step()
        self._undos = [undo for undo in self._undos if undo.directory != path]

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        old = self._kept(target) if target.exists() else None
        super().rename(source, target)
        self._note(target)

        def undo() -> None:
            target.rename(source)
            if old is not None:
                os.link(old, target)

        self._undos.append(_Undo(target.parent, undo))

    def link(self, source: Path, target: Path) -> None:
        self._step()
        super().link(source, target)
        self._note(target)
        self._undos.append(_Undo(target.parent, target.unlink))

    def touch(self, path: Path) -> None:
        self._step()
        super().touch(path)

    def unlink(self, path: Path) -> None:
        self._step()
        old = self._kept(path) if path.exists() else None
        super().unlink(path)
        if old is not None:
            self._undos.append(_Undo(path.parent, lambda: os.link(old, path)))

    def make_directory(self, path: Path) -> None:
        # Made once, by the first operation; not what these tests are about.
        path.mkdir(parents=True, exist_ok=True)

    def power_off(self, *, lose_names: bool, lose_contents: bool) -> None:
        """What the disk has when the machine comes back."""
        if lose_names:
            for each in reversed(self._undos):
                with suppress(FileNotFoundError):
                    each.undo()
        if lose_contents:
            for inode, path in self._written.items():
                if inode not in self._synced:
                    for name in path.parent.glob("*"), path.parent.glob(".*"):
                        for found in name:
                            if found.is_file() and found.stat().st_ino == inode:
                                found.write_bytes(b"")

    def _step(self) -> None:
        self.count += 1
        if self._crash_at is not None and self.count >= self._crash_at:
            raise Crash(f"at operation {self.count}")

    def _made(self, path: Path) -> None:
        self._note(path)
        self._undos.append(_Undo(path.parent, path.unlink))

    def _note(self, path: Path) -> None:
        """Where the content of an inode was last seen, whoever wrote it."""
        self._written[path.stat().st_ino] = path

    def _kept(self, path: Path) -> Path:
        """A name that keeps what is about to lose its own."""
        kept = self._backup / f"{self.count}"
        os.link(path, kept)
        return kept
