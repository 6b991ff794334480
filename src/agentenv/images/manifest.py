"""Manifests and indexes: parsed, checked, and the one manifest of a platform chosen.

Pure: bytes in, values out. What this package cannot use (schema 1, foreign or encrypted layers, artifacts that are no
image) is refused here, by name, before anything is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.errors import ImageError, Unsupported
from agentenv.images import media
from agentenv.images._json import json_object
from agentenv.images.reference import DIGEST

# The distribution specification lets a registry refuse more than 4 MiB.
MANIFEST_BYTES_MAX: Final = 4 << 20
# A disk has at most 255 layers; below it the sandboxes' own need room.
LAYERS_MAX: Final = 200
# The largest layers that people publish (models) have tens of gigabytes.
LAYER_BYTES_MAX: Final = 256 << 30


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system and a processor, as image indexes name them."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


LINUX_AMD64: Final = Platform()
_ARCHITECTURES: Final[Mapping[str, str]] = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "i386": "386"}
# What the architecture's name alone means.
_BASE_VARIANTS: Final[Mapping[str, str]] = {"amd64": "v1", "arm64": "v8", "arm": "v7"}


def parse_platform(text: str) -> Platform:
    """`os/architecture[/variant]`. Raises `ImageError`."""
    parts = text.lower().split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ImageError(f"{text!r} is not a platform; use os/architecture[/variant], as linux/amd64")
    return Platform(parts[0], _ARCHITECTURES.get(parts[1], parts[1]), parts[2] if len(parts) == 3 else None)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A document or blob by content: its type, digest and size in bytes."""

    media_type: str
    digest: str
    size_bytes: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Platform | None = None
    artifact_type: str = ""
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image of one platform. `digest` is that of its bytes."""

    digest: str
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]
    artifact_type: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """Several manifests to choose from."""

    digest: str
    media_type: str
    manifests: tuple[Descriptor, ...]


def digest_of(content: bytes) -> str:
    """`sha256:<hex>` of the bytes."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def parse_manifest(raw: bytes, content_type: str, origin: str) -> Manifest | Index:
    """Read a manifest or an index; `content_type` decides where the document does not say what it is.

    Raises `Unsupported` (schema 1, no image at all) or `ImageError`, naming `origin`.
    """
    body = json_object(raw, f"{origin}: manifest", MANIFEST_BYTES_MAX)
    media_type = str(body.get("mediaType") or content_type.partition(";")[0].strip())
    if media_type in media.SCHEMA_1 or body.get("schemaVersion") == 1:
        raise Unsupported(
            f"{origin}: a Docker manifest of schema 1, which registries stopped taking; pull it with an old docker "
            "and push it again, or name another tag"
        )
    # One document that two readers take for different things is how an approved image becomes another one.
    if "manifests" in body and ("layers" in body or "config" in body):
        raise ImageError(f"{origin}: both an index and a manifest; it is refused, since tools disagree on such")
    if "manifests" in body and media_type not in media.MANIFESTS:
        manifests = tuple(_descriptor(item, origin) for item in _list(body, "manifests", origin))
        return Index(digest_of(raw), media_type, manifests)
    if "config" not in body or media_type in media.INDEXES:
        raise Unsupported(f"{origin}: neither an image nor an index of images, but {media_type[:120]!r}")
    layers = tuple(_descriptor(item, origin) for item in _list(body, "layers", origin))
    config = _descriptor(body["config"], origin)
    artifact_type = body.get("artifactType")
    return Manifest(
        digest_of(raw),
        media_type,
        config,
        layers,
        _annotations(body, origin),
        artifact_type if isinstance(artifact_type, str) else "",
    )


def check_runnable(manifest: Manifest, origin: str) -> None:
    """Refuse what cannot be converted, by name. Raises `Unsupported` or `ImageError`."""
    if manifest.config.media_type not in media.CONFIGS:
        kind = manifest.artifact_type or manifest.config.media_type
        raise Unsupported(f"{origin}: an artifact of type {kind[:120]!r} and no container image")
    if len(manifest.layers) > LAYERS_MAX:
        raise Unsupported(f"{origin}: {len(manifest.layers)} layers; at most {LAYERS_MAX} fit below a sandbox's disk")
    for layer in manifest.layers:
        if media.is_foreign(layer.media_type) or layer.urls:
            raise Unsupported(
                f"{origin}: layer {layer.digest} is foreign ({layer.media_type}): the registry does not hold it, "
                "only an address elsewhere"
            )
        if layer.media_type not in media.LAYERS:
            raise Unsupported(f"{origin}: layer {layer.digest} is of the unknown type {layer.media_type[:120]!r}")
        if layer.size_bytes > LAYER_BYTES_MAX:
            raise Unsupported(f"{origin}: layer {layer.digest} has {layer.size_bytes} bytes; the limit is 256 GiB")


def choose(index: Index, platform: Platform, origin: str) -> Descriptor:
    """The entry of the platform. Raises `Unsupported` listing what there is instead."""
    matching = [entry for entry in index.manifests if entry.platform and _matches(entry.platform, platform)]
    if matching:
        return min(matching, key=lambda entry: _rank(entry.platform, platform))
    # Some tools write an index of one image and leave the platform to its configuration, which is checked later.
    unnamed = [entry for entry in index.manifests if entry.platform is None]
    if len(index.manifests) == 1 and unnamed:
        return unnamed[0]
    there = sorted({str(entry.platform) for entry in index.manifests if _is_real(entry.platform)})
    raise Unsupported(f"{origin}: no image for {platform}; there is {', '.join(there) or 'nothing'}")


def check_platform(os: str, architecture: str, platform: Platform, origin: str) -> None:
    """Refuse an image whose own configuration is of another platform. Raises `Unsupported`."""
    found = Platform(os or "linux", _ARCHITECTURES.get(architecture, architecture) or platform.architecture)
    if (found.os, found.architecture) != (platform.os, platform.architecture):
        raise Unsupported(f"{origin}: the image is for {found}, not for {platform}")


def _matches(offered: Platform, wanted: Platform) -> bool:
    if (offered.os, offered.architecture) != (wanted.os, wanted.architecture):
        return False
    base = _BASE_VARIANTS.get(wanted.architecture)
    # linux/amd64/v3 needs instructions that linux/amd64 does not promise.
    return (offered.variant or base) == (wanted.variant or base) or (offered.variant is None)


def _rank(offered: Platform | None, wanted: Platform) -> int:
    assert offered is not None, "only entries with a platform are compared"
    return 0 if offered.variant == wanted.variant else 1


def _is_real(platform: Platform | None) -> bool:
    """Attestations stand in indexes as unknown/unknown."""
    return platform is not None and platform.os != "unknown"


def _list(body: Mapping[str, Any], name: str, origin: str) -> Sequence[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise ImageError(f"{origin}: {name!r} of the manifest is not a list")
    return value


def _descriptor(item: object, origin: str) -> Descriptor:
    if not isinstance(item, dict):
        raise ImageError(f"{origin}: a descriptor in the manifest is not an object")
    digest, size, media_type = item.get("digest"), item.get("size"), item.get("mediaType")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ImageError(f"{origin}: the manifest names {str(digest)[:80]!r}, which is no sha256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ImageError(f"{origin}: the manifest gives {digest} no size")
    urls = item.get("urls") or []
    artifact_type = item.get("artifactType")
    return Descriptor(
        media_type if isinstance(media_type, str) else "",
        digest,
        size,
        _annotations(item, origin),
        _platform(item.get("platform")),
        artifact_type if isinstance(artifact_type, str) else "",
        tuple(str(url) for url in urls) if isinstance(urls, list) else (),
    )


def _annotations(body: Mapping[str, Any], origin: str) -> Mapping[str, str]:
    value = body.get("annotations") or {}
    if not isinstance(value, dict):
        raise ImageError(f"{origin}: the annotations of the manifest are not an object")
    return {str(name): str(text) for name, text in value.items()}


def _platform(item: object) -> Platform | None:
    if not isinstance(item, dict):
        return None
    architecture = str(item.get("architecture") or "").lower()
    variant = item.get("variant")
    return Platform(
        str(item.get("os") or "").lower(),
        _ARCHITECTURES.get(architecture, architecture),
        variant if isinstance(variant, str) and variant else None,
    )
