"""Which kernel modules the guest needs, and in which order they load.

Owns reading one modules tree (`/lib/modules/RELEASE`). A package that was only unpacked has no modules.dep, since
`depmod` makes that at install time; so dependencies are read from the modules themselves (`depends=` in .modinfo).
"""

from __future__ import annotations

import lzma
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import ImageError

# virtio_mmio comes first: it is the bus that the others' devices appear on. ext4 and fuse are built in.
GUEST_MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_balloon", "virtio_rng")
_SUFFIXES = (".ko", ".ko.xz", ".ko.gz", ".ko.zst")
MODULE_BYTES_MAX = 16 << 20


def collect_modules(tree: Path, names: Sequence[str], into: Path) -> list[str]:
    """Write `names` and all they depend on, decompressed, and `order` into a folder; return the order.

    Modules that are built into the kernel are left out. Raises `ImageError` for one that is neither.
    """
    files = {_name(path): path for path in sorted(tree.rglob("*.ko*")) if path.name.endswith(_SUFFIXES)}
    builtin = _builtin(tree)
    order: list[str] = []
    content: dict[str, bytes] = {}

    def visit(name: str, wanted_by: str) -> None:
        if name in content or name in builtin:
            return
        if name not in files:
            raise ImageError(f"the kernel in {tree.name} has no module {name}, which {wanted_by} needs")
        content[name] = _decompress(files[name])
        for dependency in dependencies(content[name], name):
            visit(dependency, name)
        order.append(name)

    for wanted in names:
        visit(wanted, "the guest")
    for name in order:
        (into / f"{name}.ko").write_bytes(content[name])
    (into / "order").write_text("".join(f"{name}.ko\n" for name in order))
    return order


def dependencies(module: bytes, name: str) -> list[str]:
    """The `depends=` of a module, by its ELF .modinfo section. Raises `ImageError` on anything but a module."""
    for entry in _modinfo(module, name).split(b"\0"):
        if entry.startswith(b"depends="):
            return [_underscores(part) for part in entry[8:].decode("ascii", "replace").split(",") if part]
    raise ImageError(f"the kernel module {name} does not say what it depends on")


def _modinfo(module: bytes, name: str) -> bytes:
    try:
        if module[:5] != b"\x7fELF\x02":
            raise ImageError(f"the kernel module {name} is not a 64-bit ELF file")
        (offset,) = struct.unpack_from("<Q", module, 40)
        size, count, strings = struct.unpack_from("<HHH", module, 58)
        names_at = struct.unpack_from("<Q", module, offset + strings * size + 24)[0]
        for index in range(count):
            at = offset + index * size
            name_at, _, _, _, start, length = struct.unpack_from("<IIQQQQ", module, at)
            if module[names_at + name_at :].startswith(b".modinfo\0"):
                return module[start : start + length]
    except struct.error as error:
        raise ImageError(f"the kernel module {name} is truncated") from error
    raise ImageError(f"the kernel module {name} has no .modinfo section")


def _builtin(tree: Path) -> set[str]:
    try:
        lines = (tree / "modules.builtin").read_text().split()
    except OSError as error:
        raise ImageError(f"{tree} is no modules folder: modules.builtin cannot be read") from error
    return {_name(Path(line)) for line in lines}


def _name(path: Path) -> str:
    return _underscores(path.name.split(".ko")[0])


def _underscores(name: str) -> str:
    return name.replace("-", "_")


def _decompress(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        if path.name.endswith(".xz"):
            return lzma.LZMADecompressor().decompress(raw, MODULE_BYTES_MAX)
        if path.name.endswith(".gz"):
            return zlib.decompressobj(31).decompress(raw, MODULE_BYTES_MAX)
        if path.name.endswith(".zst"):
            return subprocess.run(["zstd", "-dc"], input=raw, capture_output=True, timeout=30, check=True).stdout
    except (OSError, lzma.LZMAError, zlib.error, subprocess.SubprocessError) as error:
        raise ImageError(f"the kernel module {path} cannot be unpacked: {error}") from error
    return raw
