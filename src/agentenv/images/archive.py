"""Archives of images, as `Source`s: an OCI layout in a tar file, and what `docker save` writes.

Owns which member means what. Layers are copied out of the archive, since whatever unpacks them wants a file.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Final

from agentenv.errors import ImageError, ImageNotFound, InvalidRequest
from agentenv.images import media
from agentenv.images._json import json_value
from agentenv.images._tar import TarIndex
from agentenv.images._threads import until_stopped
from agentenv.images.config import CONFIG_BYTES_MAX, ImageConfig, parse_config
from agentenv.images.layout import INDEX_FILE, blob_path
from agentenv.images.manifest import (
    LAYERS_MAX,
    LINUX_AMD64,
    MANIFEST_BYTES_MAX,
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_platform,
    digest_of,
    parse_manifest,
)
from agentenv.images.reference import LocalReference, parse_reference
from agentenv.images.source import Image, ImageLayer, OnBytes, check_config_size, one_of, resolve_image

_DOCKER_INDEX_FILE: Final = "manifest.json"


class _Archive:
    """What both kinds share: the tar is opened once, in a thread, and layers are copied out of it."""

    def __init__(self, reference: LocalReference, platform: Platform = LINUX_AMD64) -> None:
        self._reference = reference
        self._platform = platform
        self._tar: TarIndex | None = None
        self._image: Image | None = None

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        """See `Source.fetch_layer`."""
        tar = await self._opened()
        loop = asyncio.get_running_loop()
        stop = threading.Event()
        name = blob_path(layer.key) if layer.blob is not None else layer.key

        def on_piece(count: int) -> None:
            loop.call_soon_threadsafe(on_bytes, count)

        # The file is the caller's to remove, so a cancel waits until its writer is gone.
        await until_stopped(stop, tar.copy, name, into, stop.is_set, on_piece)
        return into

    async def aclose(self) -> None:
        """See `Source.aclose`."""
        if self._tar is not None:
            await asyncio.to_thread(self._tar.close)
            self._tar = None

    async def _opened(self) -> TarIndex:
        if self._tar is None:
            stop = threading.Event()
            await until_stopped(stop, self._open, stop)
        assert self._tar is not None, "opened above"
        return self._tar

    def _open(self, stop: threading.Event) -> None:
        # Kept by the thread itself: after a cancel it is still there to be closed.
        self._tar = TarIndex(Path(self._reference.path), stop.is_set)

    async def _document(self, name: str, bytes_max: int) -> bytes:
        tar = await self._opened()
        return await asyncio.to_thread(tar.read, name, bytes_max)


class OciArchiveSource(_Archive):
    """An OCI layout in a tar file."""

    async def image(self) -> Image:
        """See `Source.image`."""
        if self._image is None:
            raw = await self._document(INDEX_FILE, MANIFEST_BYTES_MAX)
            index = parse_manifest(raw, media.OCI_INDEX, str(self._reference))
            if not isinstance(index, Index):
                raise ImageError(f"{self._reference}: {INDEX_FILE} is no index")
            entry = one_of(index, self._reference.name, self._reference.digest, str(self._reference))
            named = await self.manifest(entry.digest)
            self._image = await resolve_image(self, named, str(self._reference), self._platform)
        return self._image

    async def manifest(self, digest: str) -> Manifest | Index:
        """See `Documents`."""
        return parse_manifest(await self._verified(digest, MANIFEST_BYTES_MAX), "", str(self._reference))

    async def config(self, blob: Descriptor) -> bytes:
        """See `Documents`."""
        check_config_size(blob, str(self._reference))
        return await self._verified(blob.digest, CONFIG_BYTES_MAX)

    async def _verified(self, digest: str, bytes_max: int) -> bytes:
        raw = await self._document(blob_path(digest), bytes_max)
        if digest_of(raw) != digest:
            raise ImageError(f"{self._reference}: {digest}: the content has another digest")
        return raw


class DockerArchiveSource(_Archive):
    """What `docker save` writes, old or new: `manifest.json` names configurations and layers by path."""

    async def image(self) -> Image:
        """See `Source.image`."""
        if self._image is None:
            entry = self._entry(await self._entries())
            raw = await self._document(_text(entry, "Config", self._reference), CONFIG_BYTES_MAX)
            config = parse_config(raw, f"{self._reference}: configuration")
            check_platform(config.os, config.architecture, self._platform, str(self._reference))
            tar = await self._opened()
            layers = _docker_layers(tar, entry, config, str(self._reference))
            self._image = Image(str(self._reference), digest_of(raw), digest_of(raw), config, layers)
        return self._image

    async def _entries(self) -> list[dict[str, Any]]:
        raw = await self._document(_DOCKER_INDEX_FILE, MANIFEST_BYTES_MAX)
        body = json_value(raw, f"{self._reference}: {_DOCKER_INDEX_FILE}", MANIFEST_BYTES_MAX)
        if not isinstance(body, list) or not all(isinstance(entry, dict) for entry in body):
            raise ImageError(f"{self._reference}: {_DOCKER_INDEX_FILE} is not a list of images")
        return body

    def _entry(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        wanted = self._reference.name
        found = [entry for entry in entries if wanted is None or wanted in _canonical_tags(entry)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(sorted({tag for entry in entries for tag in _canonical_tags(entry)})) or "no names"
        if found:
            raise ImageNotFound(f"{self._reference}: {len(found)} images; name one of {there}")
        raise ImageNotFound(f"{self._reference}: no such image; there is {there}")


def _canonical_tags(entry: dict[str, Any]) -> set[str]:
    tags = set()
    for tag in entry.get("RepoTags") or ():
        try:
            tags.add(str(parse_reference(str(tag))))
        except InvalidRequest:
            continue
    return tags


def _text(entry: dict[str, Any], name: str, reference: LocalReference) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise ImageError(f"{reference}: {_DOCKER_INDEX_FILE} has no {name}")
    return value


def _docker_layers(tar: TarIndex, entry: dict[str, Any], config: ImageConfig, reference: str) -> tuple[ImageLayer, ...]:
    names = entry.get("Layers") or []
    if not isinstance(names, list) or len(names) != len(config.diff_ids) or len(names) > LAYERS_MAX:
        raise ImageError(
            f"{reference}: {len(names)} layers in {_DOCKER_INDEX_FILE}, {len(config.diff_ids)} in the configuration "
            f"(at most {LAYERS_MAX})"
        )
    return tuple(
        ImageLayer(diff_id, None, tar.size(str(name)), media.Compression.AUTO, str(name))
        for name, diff_id in zip(names, config.diff_ids, strict=True)
    )
