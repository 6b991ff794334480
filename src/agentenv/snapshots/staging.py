"""STATE/staging: layers and device states that this node writes and no snapshot has yet. Never the truth.

What a killed build or capture left here never becomes a snapshot: it is collected with `collect`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentenv.model import TierUsage
from agentenv.snapshots.stores.files import Files, translated

LAYER_ID_CHARS: Final = 24
_SECTOR_BYTES: Final = 512


def new_local_id() -> str:
    """A new id of a local layer or device state: 24 hexadecimal digits."""
    return secrets.token_hex(LAYER_ID_CHARS // 2)


class Staging:
    """The folder. Methods take milliseconds; those that walk it belong in a thread."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self._root = root
        self._files = files or Files()
        self._layers = root / "layers"
        with translated(f"cannot make {root}"):
            self._files.make_directory(self._layers)

    @property
    def layers_dir(self) -> Path:
        """Where local layers and device states lie."""
        return self._layers

    def layer(self, layer_id: str) -> Path:
        """Where a local layer is or will be."""
        return self._layers / f"{layer_id}.lsmt"

    def state(self, state_id: str) -> Path:
        """Where a local device state is or will be."""
        return self._layers / f"{state_id}.state"

    def adopt(self, sealed: Path, layer_id: str) -> None:
        """Give a sealed upper its name here: a second name, because its export still knows the first. Idempotent."""
        with translated(f"cannot add layer {layer_id}"):
            try:
                self._files.link(sealed, self.layer(layer_id))
            except FileExistsError:
                if not sealed.samefile(self.layer(layer_id)):
                    raise

    def stored_ids(self) -> set[str]:
        """Ids of all local layers and device states."""
        with translated(f"cannot list {self._layers}"):
            return {name.partition(".")[0] for name in os.listdir(self._layers) if not name.startswith(".")}

    def collect(self, candidates: set[str], needed: set[str]) -> tuple[int, int]:
        """Delete those of `candidates` that nothing needs; returns how many files and bytes (by blocks) that were.

        The caller computed `candidates` with `stored_ids` *before* it computed `needed`, so that a layer which
        appeared in between is never a candidate.
        """
        removed = freed_bytes = 0
        with translated(f"cannot collect {self._layers}"):
            for layer_id in sorted(candidates - needed):
                for path in (self.layer(layer_id), self.state(layer_id)):
                    with suppress(FileNotFoundError):
                        freed_bytes += _freed_bytes(path)
                        self._files.unlink(path)
                        removed += 1
        return removed, freed_bytes

    def usage(self, needed: Iterable[str]) -> TierUsage:
        """Sizes by blocks. A layer that is published by a link is counted in the repository as well."""
        needed = set(needed)
        size = garbage = files = 0
        with translated(f"cannot walk {self._root}"):
            for folder, _, names in os.walk(self._root):
                for name in names:
                    with suppress(FileNotFoundError):
                        taken = (Path(folder) / name).stat().st_blocks * _SECTOR_BYTES
                        size, files = size + taken, files + 1
                        if Path(folder) == self._layers and name.partition(".")[0] not in needed:
                            garbage += taken
            free = os.statvfs(self._root)
        return TierUsage(str(self._root), size, files, garbage_bytes=garbage, free_bytes=free.f_bavail * free.f_frsize)


def _freed_bytes(path: Path) -> int:
    """What goes with this name: nothing while the file has another."""
    found = path.stat()
    return found.st_blocks * _SECTOR_BYTES if found.st_nlink == 1 else 0
