"""Runs `aenv-image` and umoci on the same layers.

Owns: their command lines. The size of the disk is one that holds every case; each of our layers is checked by e2fsck.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
from pathlib import Path
from typing import Any

from tree_records import Tree, archive_tree, folder_tree

DISK_BYTES = 256 << 20
_DEADLINE_S = 120


class Bench:
    """One image, converted by the program and unpacked by the reference."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self.folder = folder
        self.layers: list[Path] = []

    def apply(self, archive: bytes, *options: str, disk_bytes: int = DISK_BYTES) -> dict[str, Any]:
        """Converts the next layer, with both digests expected. Raises `CalledProcessError`."""
        blob = gzip.compress(archive, 1)
        source = self.folder / "blob"
        source.write_bytes(blob)
        target = self.folder / f"{len(self.layers)}.lsmt"
        parents = ["--parent", *map(str, self.layers)] if self.layers else []
        expected = ["--expect-diff-id", _digest(archive), "--expect-blob", _digest(blob)]
        command = ["--size-bytes", str(disk_bytes), *parents, "--tar", str(source), "--out", str(target)]
        report = self.run("apply", *command, *expected, *options)
        self.layers.append(target)
        self.run("check", "--layer", *map(str, self.layers), "--scratch", str(self.folder))
        return report

    def tree(self) -> Tree:
        """What the converted layers hold."""
        layers = [*map(str, self.layers)]
        command = ["dump", "--layer", *layers, "--size-bytes", str(DISK_BYTES), "--out-tar", "-"]
        done = subprocess.run(
            [self._program, *command, "--scratch", str(self.folder)],
            check=True,
            capture_output=True,
            timeout=_DEADLINE_S,
        )
        return archive_tree(io.BytesIO(done.stdout))

    def reference(self, archives: list[bytes]) -> Tree:
        """What umoci makes of the archives."""
        layout, bundle = self.folder / "oci", self.folder / "bundle"
        image = f"{layout}:image"
        self._umoci("init", "--layout", str(layout))
        self._umoci("new", "--image", image)
        for archive in archives:
            (self.folder / "layer.tar").write_bytes(archive)
            self._umoci("raw", "add-layer", "--image", image, str(self.folder / "layer.tar"))
        self._umoci("unpack", "--image", image, str(bundle))
        return folder_tree(bundle / "rootfs")

    def run(self, *arguments: str) -> dict[str, Any]:
        """The result of the program. Raises `CalledProcessError`."""
        done = subprocess.run(
            [self._program, *arguments], check=True, capture_output=True, text=True, timeout=_DEADLINE_S
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def in_namespace(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The program as the arguments of a shell script with mounts of its own."""
        command = ["unshare", "--mount", "sh", "-c", script, "sh", str(self._program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The program, fed by a pipe. The caller ends it."""
        pipe = subprocess.PIPE
        return subprocess.Popen([self._program, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)

    def _umoci(self, *arguments: str) -> None:
        # Folders that no layer names get the modes of the mask.
        subprocess.run(
            ["umoci", *arguments],
            check=True,
            capture_output=True,
            timeout=_DEADLINE_S,
            umask=0o22,
        )


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
