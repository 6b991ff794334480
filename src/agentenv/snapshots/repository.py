"""The committed repository of one node: `layers/` (sealed files) and `snapshots/` (one JSON record each).

The only truth about what exists. A snapshot exists once its record has appeared under its final name; everything
before that is garbage that `collect` removes. Order of a commit: layers durable, then the record (write, fsync,
rename, fsync of the directory).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentenv.errors import OperationFailed, StorageFull
from agentenv.model import SnapshotManifest
from agentenv.snapshots.codec import CorruptManifest, decode_manifest, encode_manifest

log = logging.getLogger(__name__)

_LAYER_ID_CHARS: Final = 24
_LAYER_SUFFIX: Final = ".lsmt"
_STATE_SUFFIX: Final = ".state"
_RECORD_SUFFIX: Final = ".json"


def new_layer_id() -> str:
    """A new id of a layer or a device state: 24 hexadecimal digits. Content addresses replace it at publication."""
    return secrets.token_hex(_LAYER_ID_CHARS // 2)


class Repository:
    """Files of committed snapshots. Methods block on the disk for milliseconds; call them from a worker thread."""

    def __init__(self, root: Path) -> None:
        self._layers = root / "layers"
        self._records = root / "snapshots"
        for directory in (self._layers, self._records):
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def layers_dir(self) -> Path:
        return self._layers

    def layer_path(self, layer_id: str) -> Path:
        """Where the sealed layer is or will be."""
        return self._layers / (layer_id + _LAYER_SUFFIX)

    def state_path(self, state_id: str) -> Path:
        """Where the device state is or will be."""
        return self._layers / (state_id + _STATE_SUFFIX)

    def layer_paths(self, layer_ids: Iterable[str]) -> list[str]:
        """Paths for blockd, in the same order."""
        return [str(self.layer_path(layer_id)) for layer_id in layer_ids]

    def adopt_layer(self, sealed: Path, layer_id: str) -> None:
        """Give a sealed upper its name in the repository: a second name of the same inode.

        A link rather than a rename, because the export that wrote it still knows it by its old path. Idempotent.
        """
        with _translated(f"cannot add layer {layer_id}"):
            try:
                os.link(sealed, self.layer_path(layer_id))
            except FileExistsError:
                if not os.path.samefile(sealed, self.layer_path(layer_id)):
                    raise

    def commit(self, manifest: SnapshotManifest) -> None:
        """Make the record appear, durably. The layers it names must be durable already."""
        path = self._records / (manifest.snapshot_id + _RECORD_SUFFIX)
        with _translated(f"cannot commit snapshot {manifest.snapshot_id}"):
            write_durably(path, encode_manifest(manifest))

    def remove(self, snapshot_id: str) -> None:
        """Hide a snapshot. Its layers stay until `collect` finds them unneeded. Idempotent."""
        with _translated(f"cannot remove snapshot {snapshot_id}"):
            (self._records / (snapshot_id + _RECORD_SUFFIX)).unlink(missing_ok=True)

    def load(self) -> list[SnapshotManifest]:
        """All committed snapshots. A record that cannot be read is skipped and told in the log, never deleted."""
        found = []
        for path in sorted(self._records.glob("*" + _RECORD_SUFFIX)):
            try:
                found.append(decode_manifest(path.read_bytes(), str(path)))
            except CorruptManifest as error:
                log.error("snapshot record skipped: %s", error)
        return found

    def stored_ids(self) -> set[str]:
        """Ids of all layers and device states in the directory."""
        suffixes = (_LAYER_SUFFIX, _STATE_SUFFIX)
        return {Path(name).stem for name in os.listdir(self._layers) if name.endswith(suffixes)}

    def collect(self, candidates: set[str], needed: set[str]) -> int:
        """Delete those of `candidates` that nothing needs; return how many.

        The caller computed `candidates` with `stored_ids` *before* it computed `needed`, so that a layer which
        appeared in between is never a candidate.
        """
        removed = 0
        for layer_id in candidates - needed:
            for path in (self.layer_path(layer_id), self.state_path(layer_id)):
                try:
                    path.unlink()
                    removed += 1
                except FileNotFoundError:
                    continue
        return removed


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file so that after a crash either the old or the new content is there, and the new one after return."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{what}: the disk is full") from error
        raise OperationFailed(f"{what}: {error.strerror}") from error
