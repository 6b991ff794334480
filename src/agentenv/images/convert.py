"""Images become disks: each OCI layer one layer over its parent, converted once and shared by every image that has it.

Owns the order of the work, its staging folder and single flight. The bytes are `aenv-image`'s, downloads the source's,
and what was converted is remembered by `ConvertedLayers` (the repository). Whatever ends a conversion leaves only
layers that are recorded already; a kill leaves its staging folder, which the node removes at its next start.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from agentenv.errors import InvalidRequest, Unsupported
from agentenv.images import media
from agentenv.images._claims import Claims
from agentenv.images._staging import staging_folder
from agentenv.images._threads import all_over, to_its_end
from agentenv.images.chain import EMPTY_DIFF_ID, EMPTY_TAR, chain_keys, without_empty
from agentenv.images.config import ImageConfig
from agentenv.images.program import LayerMaker, LayerTask, OnProgress
from agentenv.images.source import Image, ImageLayer, Source
from agentenv.model import DiskStack, Progress, Report

DISK_MIB_MIN: Final = 16
DISK_MIB_MAX: Final = 1 << 20
# Packed layers that may wait on the disk for their conversion.
AHEAD_MAX: Final = 4
# Conversions use a core each; the sandboxes need the others.
CONVERSIONS_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A converted layer by its layer id, and the one that it was made over (None: it holds the file system)."""

    layer_id: str
    parent_id: str | None


class ConvertedLayers(Protocol):
    """What is converted already, by chain key; the repository's part of this.

    Whatever `get` and `put` return must stay until the caller of `convert` has named it in a record of its own, or
    longer than any conversion takes.
    """

    async def get(self, chain_key: str) -> ConvertedLayer | None: ...

    async def put(self, chain_key: str, layer: Path, parent_id: str | None) -> ConvertedLayer:
        """Publish the file, durably, and record it, in the place of an older one. Leaves `layer` as it is."""

    async def local_file(self, layer_id: str, folder: Path) -> Path:
        """The layer as a plain file on this node, to be read as a parent: its own, or a copy made in `folder`."""


@dataclass(frozen=True, slots=True)
class ConvertedImage:
    """A disk with an image's files, and what the image says of itself."""

    disk: DiskStack
    config: ImageConfig
    # Of the manifest of the chosen platform, and of what the name meant (an index, perhaps).
    manifest_digest: str
    named_digest: str
    reference: str
    # How many of the layers were converted now; the others were there.
    converted: int


class Converter:
    """Converts images, several at once. For one event loop."""

    def __init__(
        self,
        layers: ConvertedLayers,
        maker: LayerMaker,
        staging_dir: Path,
        conversions_max: int = CONVERSIONS_MAX,
    ) -> None:
        """`staging_dir` (STATE/staging/images) holds one folder for each conversion under way."""
        self.layers = layers
        self.maker = maker
        self.claims = Claims()
        self.turns = asyncio.Semaphore(conversions_max)
        self._staging_dir = staging_dir

    async def convert(self, source: Source, disk_mib: int, report: Report) -> ConvertedImage:
        """The image of `source` as a disk of `disk_mib`.

        Raises `InvalidRequest` (size), what `Source` raises, `ImageError`, `StorageFull` (naming what is missing). Safe
        to cancel: processes are ended and the staging folder removed before the cancel goes on.
        """
        if not DISK_MIB_MIN <= disk_mib <= DISK_MIB_MAX:
            raise InvalidRequest(f"a disk of {disk_mib} MiB is out of range: {DISK_MIB_MIN} to {DISK_MIB_MAX}")
        report(Progress("asking what the image is"))
        image = await source.image()
        _check_files(image)
        async with staging_folder(self._staging_dir) as staging:
            work = _Work(self, source, image, disk_mib << 20, staging, report)
            ids = await work.run()
        disk = DiskStack(disk_mib << 20, tuple(ids))
        return ConvertedImage(disk, image.config, image.digest, image.named_digest, image.reference, work.converted)


class _Work:
    """One conversion under way. Works from the bottom of the chain upwards, as `Claims` asks for."""

    def __init__(
        self, converter: Converter, source: Source, image: Image, size_bytes: int, staging: Path, report: Report
    ) -> None:
        self.converted = 0
        self._of = converter
        self._source = source
        self._layers = without_empty(image.layers) or [_EMPTY_LAYER]
        self._keys = chain_keys(size_bytes, [layer.diff_id for layer in self._layers])
        self._size_bytes = size_bytes
        self._staging = staging
        self._mine: set[str] = set()
        self._known: dict[str, ConvertedLayer | None] = {}
        self._ids: list[str] = []
        # Layers as files: made by this conversion, or asked for as parents.
        self._files: dict[str, Path] = {}
        self._downloads: dict[int, asyncio.Task[Path]] = {}
        self._ahead = asyncio.Semaphore(AHEAD_MAX)
        self._counted = _Counted(report, f"fetching and converting {image.reference}")

    async def run(self) -> list[str]:
        """Layer ids, bottom first."""
        # Before the first await: two conversions of one image that begin together must not both fetch it.
        self._mine = self._of.claims.take(self._keys)
        try:
            await self._look_up()
            self._begin_downloads()
            for at in range(len(self._layers)):
                self._ids.append(await self._layer_id(at))
        finally:
            self._of.claims.release(self._mine)
            await self._end_downloads()
        return self._ids

    async def _look_up(self) -> None:
        """What is converted already, asked for all at once: a repository may be milliseconds away."""
        asked = [key for key in self._keys if key in self._mine]
        found = await asyncio.gather(*(self._of.layers.get(key) for key in asked))
        self._known = dict(zip(asked, found, strict=True))

    def _begin_downloads(self) -> None:
        wanted = [at for at, key in enumerate(self._keys) if key in self._mine and self._known[key] is None]
        self._counted.expect(sum(self._layers[at].size_bytes for at in wanted))
        for at in wanted:
            self._downloads[at] = asyncio.ensure_future(self._download_in_turn(at))

    async def _end_downloads(self) -> None:
        for task in self._downloads.values():
            task.cancel()
        await all_over(self._downloads.values())

    async def _layer_id(self, at: int) -> str:
        key = self._keys[at]
        while key not in self._mine:
            await self._of.claims.wait(key)
            self._mine |= self._of.claims.take([key])
        try:
            found = self._known[key] if key in self._known else await self._of.layers.get(key)
            parent = self._ids[-1] if self._ids else None
            # The same chain converted by another version of the tools has other blocks: what was made over those must
            # not be put on top of these.
            if found is None or found.parent_id != parent:
                found = await self._convert(at, parent)
            return found.layer_id
        finally:
            self._mine.discard(key)
            self._of.claims.release([key])

    async def _convert(self, at: int, parent: str | None) -> ConvertedLayer:
        layer, out = self._layers[at], self._staging / f"{at}.lsmt"
        tar = await self._downloaded(at)
        parents = [await self._parent_file(layer_id) for layer_id in self._ids]
        identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"aenv:{self._keys[at]}"))
        blob = layer.blob.digest if layer.blob is not None else None
        task = LayerTask(
            *(self._size_bytes, tuple(parents), tar, layer.compression, layer.diff_id, blob, layer.size_bytes),
            *(out, identity),
        )
        on_progress = self._counted.of_conversion(layer.size_bytes)
        async with self._of.turns:
            await self._of.maker.apply(task, on_progress)
        # A short one may have said nothing.
        on_progress(1, 1)
        self._forget_download(at, tar)
        made = await self._of.layers.put(self._keys[at], out, parent)
        self._files[made.layer_id] = out
        self.converted += 1
        return made

    async def _parent_file(self, layer_id: str) -> Path:
        if layer_id not in self._files:
            self._files[layer_id] = await self._of.layers.local_file(layer_id, self._staging)
        return self._files[layer_id]

    async def _downloaded(self, at: int) -> Path:
        if (task := self._downloads.get(at)) is not None:
            return await task
        # Somebody else was to convert it and failed, or its parent is another one now.
        self._counted.expect(self._layers[at].size_bytes)
        return await self._download(at)

    async def _download_in_turn(self, at: int) -> Path:
        """Started in the order of the chain, so the lowest layer never waits behind a higher one."""
        await self._ahead.acquire()
        return await self._download(at)

    async def _download(self, at: int) -> Path:
        layer, into = self._layers[at], self._staging / f"{at}.tar"
        if layer is _EMPTY_LAYER:
            await to_its_end(into.write_bytes, EMPTY_TAR)
            return into
        return await self._source.fetch_layer(layer, into, self._counted.fetched)

    def _forget_download(self, at: int, tar: Path) -> None:
        # A source's own file stays where it is.
        if tar.parent == self._staging:
            tar.unlink(missing_ok=True)
        if self._downloads.pop(at, None) is not None:
            self._ahead.release()


class _Counted:
    """Bytes of all layers of one image: each byte counts half when fetched and half when converted."""

    def __init__(self, report: Report, text: str) -> None:
        self._report = report
        self._text = text
        self._halves = 0
        self._total = 0

    def expect(self, count: int) -> None:
        self._total += count
        if self._total:
            self._say()

    def fetched(self, count: int) -> None:
        self._halves += count
        self._say()

    def of_conversion(self, size_bytes: int) -> OnProgress:
        """Takes the progress of one layer's conversion, in whatever bytes it counts."""
        said = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal said
            now = size_bytes * min(done, total) // total if total > 0 else said
            self._halves, said = self._halves + now - said, now
            self._say()

        return on_progress

    def _say(self) -> None:
        self._report(Progress(self._text, min(max(self._halves // 2, 0), self._total), self._total))


_EMPTY_LAYER: Final = ImageLayer(EMPTY_DIFF_ID, None, len(EMPTY_TAR), media.Compression.NONE, "")


def _check_files(image: Image) -> None:
    """A layer that holds a disk looks like one with a single file. Raises `Unsupported`."""
    for layer in image.layers:
        notes = layer.blob.annotations if layer.blob is not None else {}
        if media.OVERLAYBD_DIGEST in notes or media.TURBO_DIGEST in notes:
            raise Unsupported(
                f"{image.reference}: layer {layer.diff_id} is a disk's layer (overlaybd) and no archive of files; such "
                "an image can only be used on demand, from its registry, with every layer stored as it is"
            )
