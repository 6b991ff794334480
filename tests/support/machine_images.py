"""Images that machines can run: trees around Debian's static busybox, as OCI images and as overlaybd images.

Layers are tars of `Entry`s, since they need links, modes and owners. Overlaybd layers are made by `aenv-image` and
`aenv-storage`, the programs that a node itself uses.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentenv.images import media
from tests.host import built
from tests.support.oci import digest_of
from tests.support.registry import Registry

_OVERLAYBD = "containerd.io/snapshot/overlaybd/"


@dataclass(frozen=True)
class Entry:
    """One member of a layer: a directory without content, a link with a target, or a file."""

    name: str
    content: bytes | None = None
    link: str | None = None
    mode: int = 0o755
    uid: int = 0

    def add_to(self, tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(self.name)
        info.mode, info.uid, info.gid = self.mode, self.uid, self.uid
        if self.link is not None:
            info.type, info.linkname = tarfile.SYMTYPE, self.link
        elif self.content is None:
            info.type = tarfile.DIRTYPE
        else:
            info.size = len(self.content)
        tar.addfile(info, io.BytesIO(self.content or b""))


def layer(entries: Iterable[Entry]) -> bytes:
    """The tar of a layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for entry in entries:
            entry.add_to(tar)
    return out.getvalue()


def static_busybox() -> bytes:
    """The program; the test is skipped where there is none."""
    found = shutil.which("busybox")
    content = b"/ld-linux-" if found is None else Path(found).read_bytes()
    if b"/ld-linux-" in content:
        pytest.skip("no statically linked busybox on this machine (Debian: busybox-static)")
    return content


def busybox_tree() -> list[Entry]:
    """`/bin` with a link for each of its commands, and `/tmp`; no users, no shell but its own."""
    names = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = [Entry(f"bin/{name}", link="busybox") for name in names if name != "busybox"]
    return [Entry("bin"), Entry("bin/busybox", static_busybox()), *links, Entry("tmp", mode=0o1777)]


def overlaybd_layers(tars: Sequence[bytes], disk_mib: int, folder: Path) -> list[Path]:
    """The layers of a disk with these files, bottom first: dense LSMT files."""
    made: list[Path] = []
    for number, content in enumerate(tars):
        tar, out = folder / f"{number}.tar", folder / f"{number}.lsmt"
        tar.write_bytes(content)
        command = [
            str(built("aenv-image") / "aenv-image"),
            "apply",
            "--size-bytes",
            str(disk_mib << 20),
            "--tar",
            str(tar),
        ]
        command += [word for parent in made for word in ("--parent", str(parent))]
        subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, timeout=120)
        made.append(out)
    return made


def as_zfile(lsmt: Path, folder: Path) -> Path:
    """The layer packed with LZ4, as upstream's tools publish it."""
    stores = folder / "stores.json"
    stores.write_text('{"stores": {}, "registries": {}, "encryption_key": null}')
    command = [str(built("aenv-storage") / "aenv-storage"), "publish", "--layer", str(lsmt), "--stores", str(stores)]
    command += ["--dir", str(folder), "--prefix", "layers/", "--compress", "lz4"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / "layers" / f"{json.loads(done.stdout)['digest']}.lsmt"


def push_overlaybd(
    registry: Registry, repository: str, tag: str, layers: Sequence[Path], config: Mapping[str, Any]
) -> int:
    """Push layers as they are, as an image says that can be read on demand; their bytes in all."""
    contents = [path.read_bytes() for path in layers]
    body = {"architecture": "amd64", "os": "linux", "config": dict(config)}
    body["rootfs"] = {"type": "layers", "diff_ids": [digest_of(content) for content in contents]}
    raw = json.dumps(body).encode()
    for content in (raw, *contents):
        registry.push_blob(content, repository)
    manifest = {
        "schemaVersion": 2,
        "mediaType": media.OCI_MANIFEST,
        "config": {"mediaType": media.OCI_CONFIG, "digest": digest_of(raw), "size": len(raw)},
        "layers": [_described(content) for content in contents],
    }
    registry.push_manifest(json.dumps(manifest).encode(), media.OCI_MANIFEST, repository, tag)
    return sum(len(content) for content in contents)


def _described(content: bytes) -> dict[str, Any]:
    digest = digest_of(content)
    notes = {"blob-digest": digest, "blob-size": str(len(content)), "blob-fs-type": "ext4"}
    return {
        "mediaType": media.OCI_LAYER,
        "digest": digest,
        "size": len(content),
        "annotations": {f"{_OVERLAYBD}{name}": value for name, value in notes.items()},
    }
