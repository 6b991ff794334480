"""Finds the guest kernel and makes it bootable: an uncompressed ELF with a PVH entry, and the modules it needs.

Owns the cache of unpacked kernel packages and STATE/guest/<version>/. Does not own the guest daemon (it is handed the
binary) and never installs a package on the host: a package is downloaded, unpacked and read.

Why an uncompressed ELF: decompressing a bzImage inside the guest costs seconds when the CPU is emulated. Why the
distribution's cloud kernel: it is small, signed by someone, and gets security updates.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostUnsuitable, ImageError
from agentenv.guest.initramfs import build_initramfs, build_probe_initramfs
from agentenv.guest.modules import GUEST_MODULES, collect_modules

# The long-term line that the snapshots, the PVH boot and the KVM host of the tests were measured with.
KERNEL_LINE = "6.12"
PACKAGE_NAME = re.compile(rf"linux-image-{re.escape(KERNEL_LINE)}\.(\d+)\S*-cloud-amd64(-unsigned)?")
# Names without a downloadable version are common right after a security update; more than a few means no network.
DOWNLOAD_ATTEMPTS_MAX = 3
APT_TIMEOUT_S = 300.0
UNPACK_TIMEOUT_S = 120.0
KERNEL_BYTES_MAX = 256 << 20
HOW_TO_FIX = (
    "run `apt-get update` with a Debian source that has it (bookworm-security or trixie), "
    "or configure the path of a kernel and its modules folder"
)

_XEN_PHYS32_ENTRY = 18  # the ELF note that makes a kernel bootable by PVH


@dataclass(frozen=True, slots=True)
class GuestFiles:
    """A kernel ELF and an initramfs that belong together; `version` changes when either does.

    `probe_initramfs` is for `vmm.probe`: it prints a line and sleeps.
    """

    vmlinux: Path
    initramfs: Path
    probe_initramfs: Path
    version: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel: the ELF, and the folder with its modules decompressed and their load order."""

    vmlinux: Path
    modules: Path
    release: str


def prepare_guest(
    envd: Path,
    guest_dir: Path,
    cache_dir: Path,
    *,
    kernel: Path | None = None,
    modules_dir: Path | None = None,
    modules: Sequence[str] = GUEST_MODULES,
    refresh: bool = False,
) -> GuestFiles:
    """Make GUEST_DIR/<version>/{vmlinux,initramfs}; with `kernel` and `modules_dir` no package is fetched.

    See `fetch_kernel` for `refresh`.

    Blocking (a download the first time, milliseconds afterwards): call it from a thread. Safe to call from several
    processes at once: every file appears by rename. Raises `HostUnsuitable` when no kernel can be had here and
    `ImageError` when what was found cannot be used.
    """
    if (kernel is None) != (modules_dir is None):
        raise HostUnsuitable("a configured guest kernel needs both the kernel's path and its modules folder")
    if kernel is not None and modules_dir is not None:
        found = _unpack_once(cache_dir, _path_key(kernel, modules), kernel, modules_dir, modules)
    else:
        found = fetch_kernel(cache_dir, modules, refresh=refresh)
    if not envd.is_file():
        raise ImageError(f"the guest daemon {envd} does not exist; build it with `cargo build --release -p aenv-envd`")
    initramfs = build_initramfs(envd, found.modules)
    version = f"{found.release}-{hashlib.sha256(initramfs).hexdigest()[:12]}"
    folder = guest_dir / version
    folder.mkdir(parents=True, exist_ok=True)
    _link_once(folder / "vmlinux", found.vmlinux)
    _write_once(folder / "initramfs", initramfs)
    _write_once(folder / "probe-initramfs", build_probe_initramfs())
    return GuestFiles(folder / "vmlinux", folder / "initramfs", folder / "probe-initramfs", version)


def fetch_kernel(cache_dir: Path, modules: Sequence[str] = GUEST_MODULES, *, refresh: bool = False) -> Kernel:
    """Return the newest cached cloud kernel, or with `refresh` (or an empty cache) the newest that apt can download.

    A restart of the server therefore needs no network and changes no kernel; who upgrades asks for it. Raises
    `HostUnsuitable` when there is neither.
    """
    if not refresh and (kernel := _newest_cached(cache_dir, modules)) is not None:
        return kernel
    for package in _candidates(_package_names())[:DOWNLOAD_ATTEMPTS_MAX]:
        cached = _cached(cache_dir / _key(package, modules))
        if cached is not None:
            return cached
        archive = _download(package, cache_dir)
        if archive is None:
            continue
        try:
            return _unpack_package(archive, cache_dir, _key(package, modules), modules)
        finally:
            archive.unlink(missing_ok=True)
    if (kernel := _newest_cached(cache_dir, modules)) is not None:
        return kernel
    raise HostUnsuitable(f"no linux-image-{KERNEL_LINE}.*-cloud-amd64 package can be downloaded; {HOW_TO_FIX}")


def extract_elf(image: bytes, name: str) -> bytes:
    """Return the kernel ELF in `image`, which is the ELF itself or a bzImage. Raises `ImageError` naming `name`."""
    elf = image if image[:4] == b"\x7fELF" else _unpack_bzimage(image, name)
    if not has_pvh_entry(elf):
        raise ImageError(f"{name} is no x86-64 ELF with a PVH entry point (CONFIG_PVH); it cannot be booted directly")
    return elf


def has_pvh_entry(elf: bytes) -> bool:
    """Whether the ELF carries the Xen PHYS32_ENTRY note that the VMM's direct boot needs."""
    if len(elf) < 64 or elf[:5] != b"\x7fELF\x02":
        return False
    (offset,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for index in range(count):
        at = offset + index * size
        if at + 56 > len(elf):
            return False
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", elf, at)
        if kind == 4 and _has_note(elf[start : start + length]):
            return True
    return False


def kernel_release(elf: bytes, name: str) -> str:
    """Return the release (`uname -r`) from the kernel's banner. Raises `ImageError` when there is none."""
    found = re.search(rb"Linux version (\S+) ", elf)
    if found is None:
        raise ImageError(f"{name} has no Linux version banner; is it a Linux kernel?")
    return found.group(1).decode("ascii", "replace")


def _has_note(notes: bytes) -> bool:
    at = 0
    while at + 12 <= len(notes):
        name_size, desc_size, kind = struct.unpack_from("<III", notes, at)
        if kind == _XEN_PHYS32_ENTRY and notes[at + 12 : at + 12 + name_size].rstrip(b"\0") == b"Xen":
            return True
        at += 12 + (name_size + 3 & ~3) + (desc_size + 3 & ~3)
    return False


def _unpack_bzimage(image: bytes, name: str) -> bytes:
    """Decompress the payload that the setup header of the boot protocol (2.08 and later) points at."""
    if len(image) < 0x250 or image[0x202:0x206] == b"\0\0\0\0" or image[0x1FE:0x200] != b"\x55\xaa":
        raise ImageError(f"{name} is neither an ELF nor a bzImage")
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if len(payload) != length or length < 8:
        raise ImageError(f"{name} is truncated: its payload ends after {len(payload)} of {length} bytes")
    (size,) = struct.unpack("<I", payload[-4:])
    if size > KERNEL_BYTES_MAX:
        raise ImageError(f"{name} claims an uncompressed size of {size} bytes; the limit is {KERNEL_BYTES_MAX}")
    elf = _decompress(payload, name)
    # For gzip the last four bytes are part of the stream, for the others the build appends them: equal meaning.
    if len(elf) != size:
        raise ImageError(f"{name} unpacks to {len(elf)} bytes, its header says {size}")
    return elf


def _decompress(payload: bytes, name: str) -> bytes:
    try:
        if payload[:2] == b"\x1f\x8b":
            return zlib.decompressobj(31).decompress(payload, KERNEL_BYTES_MAX)
        if payload[:6] == b"\xfd7zXZ\0":
            return lzma.LZMADecompressor().decompress(payload, KERNEL_BYTES_MAX)
    except (zlib.error, lzma.LZMAError) as error:
        raise ImageError(f"the payload of {name} is damaged: {error}") from error
    if payload[:4] != b"\x28\xb5\x2f\xfd":
        raise ImageError(f"the payload of {name} has an unknown compression (magic {payload[:4].hex()})")
    done = _run(["zstd", "-dc"], UNPACK_TIMEOUT_S, "install the package zstd", stdin=payload[:-4])
    if done.returncode != 0:
        raise ImageError(f"the payload of {name} is damaged: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _package_names() -> list[str]:
    if shutil.which("apt-cache") is None:
        return []
    done = _run(["apt-cache", "pkgnames", f"linux-image-{KERNEL_LINE}."], APT_TIMEOUT_S, HOW_TO_FIX)
    return done.stdout.decode().split()


def _candidates(names: Iterable[str]) -> list[str]:
    """Cloud kernels of the line, newest first; the signed package before the unsigned one of the same version."""
    matches = [match for name in names if (match := PACKAGE_NAME.fullmatch(name))]
    return [m.string for m in sorted(matches, key=lambda m: (-int(m[1]), m[2] is not None, m.string))]


def _download(package: str, cache_dir: Path) -> Path | None:
    """Download one package as a file of its own; None where apt has no version of it to give."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".download-") as folder:
        command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
        done = _run(command, APT_TIMEOUT_S, HOW_TO_FIX, cwd=Path(folder))
        archives = list(Path(folder).glob("*.deb"))
        if done.returncode != 0 or len(archives) != 1:
            return None
        target = cache_dir / f".{os.getpid()}-{archives[0].name}"
        archives[0].rename(target)
        return target


def _unpack_package(archive: Path, cache_dir: Path, key: str, modules: Sequence[str]) -> Kernel:
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".package-") as folder:
        done = _run(["dpkg-deb", "-x", str(archive), folder], UNPACK_TIMEOUT_S, "install the package dpkg")
        if done.returncode != 0:
            message = done.stderr.decode(errors="replace").strip()
            raise ImageError(f"the kernel package {archive.name} cannot be unpacked: {message}")
        images = sorted(Path(folder).glob("boot/vmlinuz-*"))
        trees = [*Path(folder).glob("lib/modules/*"), *Path(folder).glob("usr/lib/modules/*")]
        if len(images) != 1 or len(trees) != 1:
            raise ImageError(f"the kernel package {archive.name} does not hold one kernel and one modules folder")
        return _unpack_once(cache_dir, key, images[0], trees[0], modules)


def _unpack_once(cache_dir: Path, key: str, image: Path, tree: Path, modules: Sequence[str]) -> Kernel:
    """Fill CACHE_DIR/<key> from a kernel image and its modules tree, unless it is there."""
    cached = _cached(cache_dir / key)
    if cached is not None:
        return cached
    try:
        elf = extract_elf(image.read_bytes(), image.name)
    except OSError as error:
        raise ImageError(f"the guest kernel {image} cannot be read: {error.strerror}") from error
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".kernel-") as made:
        folder = Path(made) / "kernel"
        (folder / "modules").mkdir(parents=True)
        (folder / "vmlinux").write_bytes(elf)
        collect_modules(tree, modules, folder / "modules")
        (folder / "release").write_text(kernel_release(elf, image.name))
        try:
            folder.rename(cache_dir / key)
        except OSError:
            # Another process was first; whatever it made has the same key and so the same content.
            if _cached(cache_dir / key) is None:
                raise
    unpacked = _cached(cache_dir / key)
    assert unpacked is not None, "the folder was renamed into place above"
    return unpacked


def _cached(folder: Path) -> Kernel | None:
    """The kernel in a cache folder; `release` is written last, and folders appear by rename."""
    try:
        release = (folder / "release").read_text()
    except OSError:
        return None
    return Kernel(folder / "vmlinux", folder / "modules", release)


def _newest_cached(cache_dir: Path, modules: Sequence[str]) -> Kernel | None:
    suffix = _key("", modules)
    names = [entry.name.removesuffix(suffix) for entry in cache_dir.glob(f"linux-image-*{suffix}")]
    found = (_cached(cache_dir / f"{name}{suffix}") for name in _candidates(names))
    return next((kernel for kernel in found if kernel is not None), None)


def _key(package: str, modules: Sequence[str]) -> str:
    return f"{package}.{hashlib.sha256(' '.join(modules).encode()).hexdigest()[:8]}"


def _path_key(kernel: Path, modules: Sequence[str]) -> str:
    """A configured kernel is known by path, size and time of change: reading 50 MB at each start is not needed."""
    try:
        status = kernel.stat()
    except OSError as error:
        raise HostUnsuitable(f"the configured guest kernel {kernel} cannot be read: {error.strerror}") from error
    identity = f"{kernel.resolve()} {status.st_size} {status.st_mtime_ns}"
    return _key(f"configured-{hashlib.sha256(identity.encode()).hexdigest()[:12]}", modules)


def _write_once(path: Path, content: bytes) -> None:
    """Create the file whole or not at all; an existing one of the same size is kept (its folder is its hash)."""
    if path.exists() and path.stat().st_size == len(content):
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.rename(path)


def _link_once(path: Path, source: Path) -> None:
    """The same for a file that need not be read: 57 MB at each start are not copied, where one disk holds both."""
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        partial.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, partial)
    partial.rename(path)


def _run(
    command: list[str], timeout_s: float, how_to_fix: str, *, stdin: bytes | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, input=stdin, cwd=cwd, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError as error:
        raise HostUnsuitable(f"{command[0]} is needed to prepare the guest kernel: {how_to_fix}") from error
    except subprocess.TimeoutExpired as error:
        raise HostUnsuitable(f"{' '.join(command[:3])} took more than {timeout_s:.0f} s") from error
