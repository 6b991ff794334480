"""Small OCI images made in memory, and written in every form that this package reads."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.images import media


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A deterministic tar of regular files; a name that ends in '/' is a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name.rstrip("/"))
            info.mode = 0o755 if name.endswith("/") else 0o644
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def pack(tar: bytes, compression: str) -> tuple[bytes, str]:
    """The packed layer and its media type."""
    if compression == "gzip":
        return gzip.compress(tar, mtime=0), f"{media.OCI_LAYER}+gzip"
    if compression == "zstd":
        packed = subprocess.run(["zstd", "-qc"], input=tar, capture_output=True, check=True, timeout=60).stdout
        return packed, f"{media.OCI_LAYER}+zstd"
    return tar, media.OCI_LAYER


@dataclass(frozen=True)
class BuiltImage:
    """One image. `layers` are tars; `packed` what is stored of them."""

    config: bytes
    layers: tuple[bytes, ...]
    packed: tuple[tuple[bytes, str], ...]
    manifest: bytes
    manifest_type: str = media.OCI_MANIFEST
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def diff_ids(self) -> list[str]:
        return [digest_of(layer) for layer in self.layers]

    def config_digest(self) -> str:
        return digest_of(self.config)

    def blobs(self) -> dict[str, bytes]:
        """All blobs but the manifest, by digest."""
        contents = [self.config, *(content for content, _ in self.packed)]
        return {digest_of(content): content for content in contents}

    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.manifest_type, "digest": self.digest, "size": len(self.manifest)}


def build_image(
    layers: Sequence[Mapping[str, bytes] | bytes],
    compressions: Sequence[str] = (),
    *,
    config: Mapping[str, Any] | None = None,
    architecture: str = "amd64",
    docker: bool = False,
) -> BuiltImage:
    """An image of these layers (files, or whole tars), packed as `compressions` say (gzip where they do not)."""
    tars = tuple(layer if isinstance(layer, bytes) else tar_of(layer) for layer in layers)
    chosen = [*compressions, *["gzip"] * (len(tars) - len(compressions))]
    packed = tuple(pack(tar, compression) for tar, compression in zip(tars, chosen, strict=True))
    body = {
        "architecture": architecture,
        "os": "linux",
        "created": "2026-01-02T03:04:05Z",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [digest_of(tar) for tar in tars]},
        "history": [{"created_by": f"layer {number}"} for number in range(len(tars))],
        "x-unknown": {"kept": True},
    }
    if docker:
        packed = tuple((content, media.DOCKER_LAYER + (".gzip" if "+" in kind else "")) for content, kind in packed)
    raw = json.dumps(body).encode()
    manifest_type = media.DOCKER_MANIFEST if docker else media.OCI_MANIFEST
    manifest = {
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": _described(raw, media.DOCKER_CONFIG if docker else media.OCI_CONFIG),
        "layers": [_described(content, kind) for content, kind in packed],
    }
    return BuiltImage(raw, tars, packed, json.dumps(manifest).encode(), manifest_type)


def index_of(images: Mapping[str, BuiltImage], media_type: str = media.OCI_INDEX) -> bytes:
    """An index of images by architecture, with an attestation as builders add them."""
    manifests = [
        image.descriptor() | {"platform": {"os": "linux", "architecture": architecture}}
        for architecture, image in images.items()
    ]
    attestation = _described(b"{}", media.OCI_MANIFEST) | {"platform": {"os": "unknown", "architecture": "unknown"}}
    body = {"schemaVersion": 2, "mediaType": media_type, "manifests": [*manifests, attestation]}
    return json.dumps(body).encode()


def write_layout(image: BuiltImage, folder: Path, *, name: str | None = None, index: bytes | None = None) -> None:
    """An OCI image layout. `index`: of which the image is one, named in its place."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    for digest, content in [*image.blobs().items(), (image.digest, image.manifest)]:
        (blobs / digest.removeprefix("sha256:")).write_bytes(content)
    entry = image.descriptor()
    if index is not None:
        (blobs / digest_of(index).removeprefix("sha256:")).write_bytes(index)
        entry = _described(index, media.OCI_INDEX)
    if name is not None:
        entry["annotations"] = {"org.opencontainers.image.ref.name": name}
    existing = json.loads((folder / "index.json").read_text())["manifests"] if (folder / "index.json").exists() else []
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [*existing, entry]}))


def write_oci_archive(image: BuiltImage, path: Path, scratch: Path, name: str | None = None) -> None:
    write_layout(image, scratch, name=name)
    with tarfile.open(path, "w") as tar:
        tar.add(scratch, ".")


def write_docker_archive(image: BuiltImage, path: Path, tags: Sequence[str]) -> None:
    """As `docker save` of old wrote it, with a layer that is twice there as a symlink."""
    names, members = [], {"config.json": image.config}
    links: dict[str, str] = {}
    for number, layer in enumerate(image.layers):
        name = f"{number}/layer.tar"
        names.append(name)
        same = next((m for m, content in members.items() if content == layer), None)
        if same is None:
            members[name] = layer
        else:
            links[name] = f"../{same}"
    entry = {"Config": "config.json", "RepoTags": list(tags), "Layers": names}
    members["manifest.json"] = json.dumps([entry]).encode()
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, link in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)


def _described(content: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}
