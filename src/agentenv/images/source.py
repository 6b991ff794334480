"""One interface over all places that images come from, and the values it deals in.

Owns the interface and the steps that every place shares: from a manifest or an index to one image of one platform. The
places are `registry_source`, `layout` (a directory) and `archive` (tar files).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from agentenv.errors import ImageError, ImageNotFound
from agentenv.images import media
from agentenv.images.config import CONFIG_BYTES_MAX, ImageConfig, parse_config
from agentenv.images.manifest import (
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_platform,
    check_runnable,
    choose,
)

# Indexes of indexes exist; more than this is an attack or a mistake.
INDEX_DEPTH_MAX: Final = 4

# Bytes that arrived since the last call; negative when some turned out to be wrong and are fetched again.
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One layer: the digest of its tar, and of its packed form where the source knows it."""

    diff_id: str
    # None in docker archives, which name layers by path.
    blob: Descriptor | None
    size_bytes: int
    compression: media.Compression
    # The place's own name for it: a digest or a path in an archive.
    key: str


@dataclass(frozen=True, slots=True)
class Image:
    """One image of one platform, as its source has it. Layers are bottom first."""

    reference: str
    # "sha256:..." of the manifest (of the configuration where there is no manifest).
    digest: str
    # Of the index or manifest that the name itself means; equal to `digest` where it names one image.
    named_digest: str
    config: ImageConfig
    layers: tuple[ImageLayer, ...]
    manifest: Manifest | None = None


class Source(Protocol):
    """A place that holds one image. For one event loop; close it."""

    async def image(self) -> Image:
        """What is there, with nothing large read yet. Asked once, answered the same afterwards.

        Raises `ImageNotFound`, `ImageError` (`RegistryError`), `Unsupported`.
        """

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        """The packed layer as a local file: `into`, or a file of the place's own that must not be changed.

        Raises `ImageNotFound`, `ImageError`, `StorageFull`. Safe to cancel; may leave a partial `into`.
        """

    async def aclose(self) -> None:
        """Give up what it holds open."""


class Documents(Protocol):
    """How a place with manifests is asked for small documents by digest."""

    async def manifest(self, digest: str) -> Manifest | Index: ...

    async def config(self, blob: Descriptor) -> bytes: ...


async def resolve_image(documents: Documents, named: Manifest | Index, reference: str, platform: Platform) -> Image:
    """The image of the platform that `named` leads to, checked to be one that can be converted."""
    found = named
    for _ in range(INDEX_DEPTH_MAX):
        if isinstance(found, Manifest):
            break
        found = await documents.manifest(choose(found, platform, reference).digest)
    if not isinstance(found, Manifest):
        raise ImageError(f"{reference}: more than {INDEX_DEPTH_MAX} indexes inside each other")
    check_runnable(found, reference)
    config = parse_config(await documents.config(found.config), f"{reference}: configuration")
    check_platform(config.os, config.architecture, platform, reference)
    layers = _layers(found, config, reference)
    return Image(reference, found.digest, named.digest, config, layers, found)


def _layers(manifest: Manifest, config: ImageConfig, reference: str) -> tuple[ImageLayer, ...]:
    if len(manifest.layers) != len(config.diff_ids):
        raise ImageError(
            f"{reference}: {len(manifest.layers)} layers in the manifest, {len(config.diff_ids)} in the configuration"
        )
    return tuple(
        ImageLayer(diff_id, blob, blob.size_bytes, media.LAYERS[blob.media_type], blob.digest)
        for blob, diff_id in zip(manifest.layers, config.diff_ids, strict=True)
    )


def one_of(index: Index, name: str | None, digest: str | None, reference: str) -> Descriptor:
    """The entry of a layout's index that is meant: by digest, by name, or the only one. Raises `ImageNotFound`."""
    if digest is not None:
        found = [entry for entry in index.manifests if entry.digest == digest]
    elif name is not None:
        found = [entry for entry in index.manifests if name in _names(entry)]
    else:
        found = list(index.manifests)
    digests = {entry.digest for entry in found}
    if len(digests) == 1:
        return found[0]
    there = sorted({n for entry in index.manifests for n in _names(entry)}) or ["no names"]
    if found:
        raise ImageNotFound(f"{reference}: {len(digests)} images; name one of {', '.join(there)}")
    raise ImageNotFound(f"{reference}: no such image; there is {', '.join(there)}")


def _names(entry: Descriptor) -> set[str]:
    """Tools write the tag alone (umoci, skopeo) or the whole reference (containerd, docker)."""
    annotation = entry.annotations.get("org.opencontainers.image.ref.name", "")
    return {name for name in (annotation, annotation.rpartition(":")[2]) if name and "/" not in name}


def check_config_size(blob: Descriptor, reference: str) -> None:
    """Refuse a configuration that is no configuration. Raises `ImageError`."""
    if blob.size_bytes > CONFIG_BYTES_MAX:
        raise ImageError(f"{reference}: a configuration of {blob.size_bytes} bytes; the limit is {CONFIG_BYTES_MAX}")
