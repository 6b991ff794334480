"""Images that a registry holds as overlaybd layers already: found, and described for reading on demand.

Owns where such are looked for (the image itself, its referrers, a tag with a suffix), which layers count, and which of
them may be read on demand: those whose blocks have checksums. Downloads none: what comes of it are blob descriptors,
whose bytes blockd reads from the registry when a guest needs them; the others are fetched whole by `whole`.

What is found is used only if every layer is usable as it is; else the image is converted like any other. An error is
never taken for "none": an image that is there to be used at once would be converted for minutes, silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentenv.errors import ImageError, ImageNotFound, Unsupported
from agentenv.images import media
from agentenv.images._overlaybd import FORM_BYTES, HEAD_BYTES, has_checksums, virtual_size
from agentenv.images.config import ImageConfig
from agentenv.images.endpoints import endpoints_of
from agentenv.images.manifest import LAYERS_MAX, Descriptor, Manifest, choose
from agentenv.images.reference import DIGEST, RegistryReference
from agentenv.images.registry import RegistryClient
from agentenv.images.registry_source import RegistrySource
from agentenv.images.source import INDEX_DEPTH_MAX

log = logging.getLogger(__name__)

# Both lead to the same kind of manifest: upstream's convertor writes the first, Azure's registry the second.
ARTIFACT_TYPES: Final = (
    "application/vnd.containerd.overlaybd.native.v1+json",
    "application/vnd.azure.artifact.streaming.v1",
)
_BLOB_SIZE: Final = "containerd.io/snapshot/overlaybd/blob-size"
_BLOB_FS_TYPE: Final = "containerd.io/snapshot/overlaybd/blob-fs-type"
_ACCELERATION_LAYER: Final = "containerd.io/snapshot/overlaybd/acceleration-layer"
# What blockd's cache fetches and keeps at a time (notes of the descriptor's format).
_BLOCK_BYTES: Final = 65_536
# Layers whose beginnings are asked for at once.
_ASKED_AT_ONCE_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class AcceleratedOptions:
    """Where to look besides the image itself."""

    referrers: bool = True
    # As `_obd`: the tag `12` is looked for as `12_obd`. Nothing proves that it is of the same image, so it is off.
    tag_suffix: str | None = None


@dataclass(frozen=True, slots=True)
class RegistryBlob:
    """An overlaybd layer in a registry."""

    registry: str
    # As the registry itself is asked for it.
    repository: str
    # "sha256:..." of the stored bytes.
    digest: str
    size_bytes: int
    # Whether a block can be verified by itself. A layer without checksums is not for reading on demand.
    has_checksums: bool

    @property
    def layer_id(self) -> str:
        """What a disk stack calls it."""
        return self.digest.removeprefix("sha256:")

    def source(self) -> dict[str, str]:
        """Where its bytes are, for a blob descriptor; `registry` is a key of stores.json."""
        return {
            "kind": "registry",
            "registry": self.registry,
            "repository": self.repository,
            "digest": self.layer_id,
        }

    def descriptor(self) -> dict[str, object]:
        """The blob descriptor that blockd is given in place of a file."""
        return {
            "aenv_blob": 1,
            "digest": self.layer_id,
            "size_bytes": self.size_bytes,
            "source": self.source(),
            "block_bytes": _BLOCK_BYTES,
            # A registry has no block list; the layer's own checksums (ZFile) are what its blocks are verified by.
            "blocks": None,
            "blocks_digest": None,
            "encryption": None,
        }


@dataclass(frozen=True, slots=True)
class AcceleratedImage:
    """An image as overlaybd layers, bottom first. `config` is that of the image that was asked for."""

    reference: str
    # Of the image that was asked for, and of the manifest that lists the layers.
    manifest_digest: str
    layers_digest: str
    config: ImageConfig
    # The convertor chose it, as a rule 64 GiB; what a guest never wrote takes no room.
    disk_bytes: int
    blobs: tuple[RegistryBlob, ...]

    @property
    def is_all_remote(self) -> bool:
        """Whether nothing of it need be kept here."""
        return all(blob.has_checksums for blob in self.blobs)


async def find_accelerated(
    source: RegistrySource, options: AcceleratedOptions | None = None
) -> AcceleratedImage | None:
    """The image's overlaybd form, or None when the registry says that it has none. Raises what the registry raises."""
    options = options or AcceleratedOptions()
    image = await source.image()
    assert image.manifest is not None, "a registry's images have manifests"
    found = usable_layers(image.manifest)
    layers_digest = image.digest
    if found is None:
        other = await _elsewhere(source, options, [image.digest, image.named_digest])
        if other is None:
            return None
        found, layers_digest = other
    reference = source.reference
    # stores.json names the registry's address without the path that may be configured with it.
    prefix = endpoints_of(reference, source.client.settings)[-1].prefix
    repository = prefix + reference.repository
    turns = asyncio.Semaphore(_ASKED_AT_ONCE_MAX)
    checked = await asyncio.gather(*(_is_checked(source, Descriptor("", *layer), turns) for layer in found))
    blobs = tuple(
        RegistryBlob(reference.registry, repository, digest, size, is_checked)
        for (digest, size), is_checked in zip(found, checked, strict=True)
    )
    disk_bytes = await _disk_bytes(source, blobs[-1])
    return AcceleratedImage(image.reference, image.digest, layers_digest, image.config, disk_bytes, blobs)


async def _is_checked(source: RegistrySource, blob: Descriptor, turns: asyncio.Semaphore) -> bool:
    async with turns:
        head = await source.client.range(source.reference, blob, 0, min(FORM_BYTES, blob.size_bytes))
    return has_checksums(head)


async def _disk_bytes(source: RegistrySource, top: RegistryBlob) -> int:
    """As the top layer says; all layers of an image say the same."""
    blob = Descriptor("", top.digest, top.size_bytes)
    head = await source.client.range(source.reference, blob, 0, min(HEAD_BYTES, top.size_bytes))
    return await asyncio.to_thread(virtual_size, head, f"{source.reference}: layer {top.digest}")


def usable_layers(manifest: Manifest) -> list[tuple[str, int]] | None:
    """Digest and size of each layer, if all of them are overlaybd layers with ext4 inside that can be read as they
    are stored."""
    layers = [layer for layer in manifest.layers if layer.annotations.get(_ACCELERATION_LAYER) != "yes"]
    if not layers or len(layers) > LAYERS_MAX or not all(_is_usable(layer) for layer in layers):
        return None
    return [(layer.digest, layer.size_bytes) for layer in layers]


def _is_usable(layer: Descriptor) -> bool:
    """Not so, for example: one whose overlaybd blob is packed once more in the layer, with another digest."""
    notes = layer.annotations
    return (
        notes.get(media.OVERLAYBD_DIGEST) == layer.digest
        and DIGEST.fullmatch(layer.digest) is not None
        and notes.get(_BLOB_SIZE, str(layer.size_bytes)) == str(layer.size_bytes)
        and notes.get(_BLOB_FS_TYPE, "ext4") in ("ext4", "")
        and media.TURBO_DIGEST not in notes
        and not layer.urls
    )


async def _elsewhere(
    source: RegistrySource, options: AcceleratedOptions, digests: Sequence[str]
) -> tuple[list[tuple[str, int]], str] | None:
    client, reference = source.client, source.reference
    # The artifact may have the image of the platform as its subject, or the whole index.
    for digest in dict.fromkeys(digests) if options.referrers else ():
        referrers = await client.referrers(reference, digest)
        for kind in ARTIFACT_TYPES:
            for entry in (entry for entry in referrers if entry.artifact_type == kind):
                if (found := await _layers_of(source, client, reference.with_digest(entry.digest))) is not None:
                    return found
    if options.tag_suffix and reference.tag and reference.digest is None:
        return await _layers_of(source, client, reference.with_tag(reference.tag + options.tag_suffix))
    return None


async def _layers_of(
    source: RegistrySource, client: RegistryClient, reference: RegistryReference
) -> tuple[list[tuple[str, int]], str] | None:
    """None also for what is listed and not there, or has nothing for the platform: that is an answer, no error."""
    try:
        found = await _manifest_of(source, client, reference)
    except (ImageNotFound, Unsupported) as error:
        log.info("no overlaybd image: %s", error)
        return None
    layers = usable_layers(found)
    if layers is None:
        log.warning("%s calls itself an overlaybd image but has layers that cannot be read on demand", reference)
        return None
    return layers, found.digest


async def _manifest_of(source: RegistrySource, client: RegistryClient, reference: RegistryReference) -> Manifest:
    found = await client.manifest(reference)
    for _ in range(INDEX_DEPTH_MAX):
        if isinstance(found, Manifest):
            return found
        chosen = choose(found, source.platform, str(reference))
        found = await client.manifest(reference.with_digest(chosen.digest))
    raise ImageError(f"{reference}: more than {INDEX_DEPTH_MAX} indexes inside each other")
