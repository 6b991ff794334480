"""A disk as an OCI image: one layer with all of its files, and the configuration that the disk's image had.

Owns the layout that is written. The files' tar comes from `aenv-image dump`; it is one flattened layer, since a disk's
layers are blocks and the original tars are not kept. Equal disks and configurations give equal bytes.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import secrets
import shutil
import tarfile
import threading
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextlib import suppress as suppressed
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from agentenv.errors import HostUnsuitable, ImageError, InvalidRequest, StorageFull
from agentenv.images import media
from agentenv.images._threads import all_over, to_its_end, until_stopped
from agentenv.images.config import ImageConfig
from agentenv.images.manifest import digest_of
from agentenv.model import Progress, Report

_PIECE_BYTES: Final = 1 << 20
# The whole disk is read, and gzip packs some 40 MB a second.
_SLOWEST_BYTES_PER_S: Final = 4_000_000
_GRACE_S: Final = 600.0
_GZIP_LEVEL: Final = 6
_EPOCH: Final = "1970-01-01T00:00:00Z"
_LAYER_TYPES: Final[Mapping[str, str]] = {
    "none": media.OCI_LAYER,
    "gzip": f"{media.OCI_LAYER}+gzip",
    "zstd": f"{media.OCI_LAYER}+zstd",
}


class Dumper(Protocol):
    """What an export needs of `ImageProgram`."""

    def dump(
        self, layers: Sequence[Path], size_bytes: int, scratch: Path, deadline_s: float
    ) -> AbstractAsyncContextManager[asyncio.StreamReader]: ...


@dataclass(frozen=True, slots=True)
class ExportedImage:
    """What was written."""

    manifest_digest: str
    diff_id: str
    layer_digest: str
    layer_bytes: int


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What is exported, and how."""

    # Local plain files, bottom first.
    layers: tuple[Path, ...]
    size_bytes: int
    # Of the image that the disk began as; None where it began as none.
    config: ImageConfig | None = None
    # "none", "gzip" or "zstd".
    compression: str = "gzip"
    # The image's name in the index.
    reference: str | None = None
    # One line of the image's history.
    comment: str = ""
    # RFC 3339; None: that of the original image, else the epoch, so that equal disks give equal bytes.
    created: str | None = None


async def export_layout(dumper: Dumper, job: ExportJob, into: Path, report: Report) -> ExportedImage:
    """Write an OCI image layout of the disk into the directory `into`, which must not exist; it appears whole.

    Raises `InvalidRequest` (`into` exists, unknown compression), `ImageError`, `StorageFull`, `HostUnsuitable`. A
    cancel or an error leaves nothing.
    """
    if job.compression not in _LAYER_TYPES:
        raise InvalidRequest(f"compression: {job.compression!r} is none of {', '.join(_LAYER_TYPES)}")
    _check_absent(into)
    partial = into.with_name(f".{into.name}.{secrets.token_hex(4)}")
    try:
        with _translated(into):
            await to_its_end((partial / "blobs" / "sha256").mkdir, parents=True)
            made = await _write(dumper, job, partial, report)
            # Without a turn of the loop: a cancel comes before it or finds the whole.
            partial.rename(into)
        return made
    finally:
        await to_its_end(shutil.rmtree, partial, ignore_errors=True)


async def export_archive(dumper: Dumper, job: ExportJob, into: Path, report: Report) -> ExportedImage:
    """As `export_layout`, but one tar file (`skopeo` calls it oci-archive). Needs room for the layer twice."""
    _check_absent(into)
    folder = into.with_name(f".{into.name}.{secrets.token_hex(4)}.layout")
    partial = into.with_name(f".{into.name}.{secrets.token_hex(4)}.partial")
    try:
        made = await export_layout(dumper, job, folder, report)
        report(Progress("packing the archive"))
        with _translated(into):
            stop = threading.Event()
            await until_stopped(stop, _pack, folder, partial, stop)
            partial.rename(into)
        return made
    finally:
        await to_its_end(_remove, folder, partial)


async def _write(dumper: Dumper, job: ExportJob, folder: Path, report: Report) -> ExportedImage:
    deadline_s = _GRACE_S + job.size_bytes / _SLOWEST_BYTES_PER_S
    packed = folder / "blobs" / "layer"
    counted = _Counted(report)
    async with dumper.dump(job.layers, job.size_bytes, folder, deadline_s) as stream:
        await _pack_layer(_pieces(stream, counted), packed, job.compression)
    digest, count = await asyncio.to_thread(_hash_file, packed)
    packed.rename(folder / "blobs" / "sha256" / digest.removeprefix("sha256:"))
    config = exported_config(job, counted.diff_id())
    layer = {"mediaType": _LAYER_TYPES[job.compression], "digest": digest, "size": count}
    described = {"mediaType": media.OCI_CONFIG, "digest": digest_of(config), "size": len(config)}
    manifest = _json({"schemaVersion": 2, "mediaType": media.OCI_MANIFEST, "config": described, "layers": [layer]})
    await to_its_end(_write_documents, folder, config, manifest, job.reference)
    return ExportedImage(digest_of(manifest), counted.diff_id(), digest, count)


def exported_config(job: ExportJob, diff_id: str) -> bytes:
    """The original configuration with every field kept, but for what names its layers."""
    body: dict[str, Any] = {} if job.config is None else dict(json.loads(job.config.raw))
    created = job.created or (job.config.created if job.config is not None else "") or _EPOCH
    body.setdefault("architecture", "amd64")
    body.setdefault("os", "linux")
    body.setdefault("config", {})
    body["created"] = created
    body["rootfs"] = {"type": "layers", "diff_ids": [diff_id]}
    # One entry for the one layer: the history of layers that are not there would make tools refuse the image.
    body["history"] = [{"created": created, "created_by": "aenv image export", "comment": job.comment}]
    return _json(body)


class _Counted:
    """Hashes what passes and tells how much it is; the whole is not known before the end."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._hash = hashlib.sha256()
        self._count = 0

    def take(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._count += len(piece)

    def say(self) -> None:
        self._report(Progress("reading and packing the disk's files", self._count))

    def diff_id(self) -> str:
        return "sha256:" + self._hash.hexdigest()


async def _pieces(stream: asyncio.StreamReader, counted: _Counted) -> AsyncIterator[bytes]:
    while piece := await stream.read(_PIECE_BYTES):
        await asyncio.to_thread(counted.take, piece)
        counted.say()
        yield piece


async def _pack_layer(pieces: AsyncIterator[bytes], into: Path, compression: str) -> None:
    if compression == "zstd":
        await _pack_zstd(pieces, into)
        return
    # Level and window are fixed, and the header's time is zero: equal tars give equal bytes.
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 31) if compression == "gzip" else None
    with into.open("wb") as out:
        async for piece in pieces:
            packed = await asyncio.to_thread(packer.compress, piece) if packer is not None else piece
            await to_its_end(out.write, packed)
        if packer is not None:
            out.write(packer.flush())


async def _pack_zstd(pieces: AsyncIterator[bytes], into: Path) -> None:
    """By the program `zstd`, which the node needs anyway: the standard library has no zstd yet."""
    with into.open("wb") as out:
        command = ("zstd", "-q", "-c", "-3", "--single-thread", "--no-check")
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=out)
        except FileNotFoundError as error:
            raise HostUnsuitable("compression zstd needs the program zstd (package zstd)") from error
        assert process.stdin is not None, "asked for a pipe"
        try:
            async for piece in pieces:
                process.stdin.write(piece)
                await process.stdin.drain()
            process.stdin.close()
            code = await process.wait()
        except (BrokenPipeError, ConnectionResetError):
            code = await process.wait()
        finally:
            if process.returncode is None:
                with suppressed(ProcessLookupError):
                    process.kill()
                await all_over([asyncio.ensure_future(process.wait())])
    if code != 0:
        # It says nothing else of a full disk.
        raise _zstd_failure(into, code)


def _zstd_failure(into: Path, code: int) -> ImageError | StorageFull:
    status = os.statvfs(into.parent)
    if status.f_bavail * status.f_frsize < _PIECE_BYTES:
        return StorageFull(f"{into.parent}: the disk is full")
    return ImageError(f"zstd ended with {code}")


def _hash_file(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return f"sha256:{digest}", file.tell()


def _write_documents(folder: Path, config: bytes, manifest: bytes, reference: str | None) -> None:
    for content in (config, manifest):
        (folder / "blobs" / "sha256" / digest_of(content).removeprefix("sha256:")).write_bytes(content)
    entry: dict[str, Any] = {
        "mediaType": media.OCI_MANIFEST,
        "digest": digest_of(manifest),
        "size": len(manifest),
        "platform": {"architecture": json.loads(config)["architecture"], "os": json.loads(config)["os"]},
    }
    if reference is not None:
        entry["annotations"] = {"org.opencontainers.image.ref.name": reference}
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [entry]}
    (folder / "index.json").write_bytes(_json(index))
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


class _Stoppable(FileIO):
    """A file whose reading ends early, as with an error, once somebody says so."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(path)
        self._stop = stop

    def read(self, size: int | None = -1, /) -> bytes:
        return b"" if self._stop.is_set() else super().read(-1 if size is None else size)


def _pack(folder: Path, into: Path, stop: threading.Event) -> None:
    """In a fixed order and without owner or time: equal layouts give equal archives. Small documents first, since
    readers that stream look for them."""
    names = sorted((path.relative_to(folder) for path in folder.rglob("*") if path.is_file()), key=_archive_order)
    with tarfile.open(into, "w", format=tarfile.USTAR_FORMAT if _all_small(folder) else tarfile.PAX_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(str(name))
            info.size, info.mode = (folder / name).stat().st_size, 0o644
            with _Stoppable(folder / name, stop) as file:
                tar.addfile(info, file)


def _archive_order(name: Path) -> tuple[int, str]:
    return (len(name.parts), str(name))


def _all_small(folder: Path) -> bool:
    """ustar's size field ends at 8 GiB."""
    return all(path.stat().st_size < 8 << 30 for path in folder.rglob("*"))


def _check_absent(into: Path) -> None:
    if into.exists():
        raise InvalidRequest(f"{into} exists already")


def _remove(folder: Path, file: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    file.unlink(missing_ok=True)


@contextmanager
def _translated(into: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{into}: the disk is full") from error
        raise ImageError(f"{into}: cannot be written: {error.strerror}") from error
