"""The root file system of the `base` template: Debian of the host's release with what the E2B clients expect.

Owns which packages are in it and how it is set up. The result is a raw, sparse ext4 image, cached by a key of all
inputs; newer packages on the mirror do not change the key: delete the file to get them. Runs no daemon and mounts
nothing on the host: the package tools run in namespaces of their own that die with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

from agentenv.errors import ImageError, StorageFull
from agentenv.templates._command import run_command
from agentenv.templates.apt_sources import Source, guest_sources, host_sources, host_suite
from agentenv.templates.ext4 import make_ext4

# bash, ncurses-bin (tput), coreutils and util-linux are in every Debian. libnss-myhostname resolves the sandbox's own
# changing name at once; without it `sudo` waits for a name server. npm drags in 350 packages, which are 106 MB in all:
# the clients' users expect it. Left out: build-essential (266 MB).
PACKAGES = (
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "libnss-myhostname",
    "nodejs",
    "npm",
    "procps",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
)
# Documentation and translations are 90 MB that no program reads; licences stay. And no fsync for each file of 500
# packages: neither the build nor a sandbox gains anything by it, since both are gone after a power loss.
_DPKG_OPTIONS = (
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)
# Part of the cache key: raise it when the steps below change.
_RECIPE = 1
BOOTSTRAP_DEADLINE_S = 1800.0
# The unpacked tree, the package files and the image's content, all at once.
_SPACE_NEEDED_BYTES = 2 << 30
_SCRATCH_PREFIX = ".rootfs-"

# Debian's own starts a process in every login shell; under emulation that is felt in each command. A PATH that is set
# already (the sandbox's environment) is kept; the one that bash makes up when there is none ends in ".".
_PROFILE = """\
case "${PATH-}" in
  "" | *:.) PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ;;
esac
export PATH
export LANG="${LANG:-C.UTF-8}"
if [ "${PS1-}" ] && [ "${BASH-}" ] && [ "$BASH" != /bin/sh ] && [ -r /etc/bash.bashrc ]; then
  . /etc/bash.bashrc
fi
for script in /etc/profile.d/*.sh; do
  if [ -r "$script" ]; then . "$script"; fi
done
unset script
"""
# Files of the guest, besides those of the packages. The sandbox belongs to its user: pip may write where it likes.
_FILES = {
    "etc/profile": _PROFILE,
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/machine-id": "",
    "etc/motd": "",
    "etc/pip.conf": "[global]\nbreak-system-packages = true\n",
    "etc/resolv.conf": "",
    # As Debian's, without `mesg`, which is a process for each login shell of root.
    "root/.profile": 'if [ "${BASH-}" ] && [ -f ~/.bashrc ]; then . ~/.bashrc; fi\n',
    "etc/sudoers.d/user": "user ALL=(ALL) NOPASSWD:ALL\n",
}
_MODES = {"etc/sudoers.d/user": 0o440}
_USER_COMMAND = "useradd --create-home --shell /bin/bash --uid 1000 --user-group user"


async def build_base_rootfs(work_dir: Path, disk_mib: int, progress: Callable[[str], None]) -> Path:
    """The image of the base template, of `disk_mib` MiB, from the cache in `work_dir` or newly made (a minute).

    Raises `ImageError`, `HostUnsuitable` (not Debian, a tool is missing), `StorageFull`. When it fails or is cancelled,
    nothing of it is left. Two builds at once make it twice; the later one wins.
    """
    suite = await asyncio.to_thread(host_suite)
    sources = await asyncio.to_thread(host_sources, suite)
    key = _key(suite, sources, disk_mib)
    image = work_dir / f"base-{suite}-{disk_mib}mib-{key}.ext4"
    if await asyncio.to_thread(image.is_file):
        progress(f"using the root file system {image}")
        return image
    async with _scratch(work_dir, _SPACE_NEEDED_BYTES) as scratch:
        root = scratch / "root"
        await _bootstrap(root, suite, sources, progress)
        await asyncio.to_thread(_set_up, root, suite)
        return await _finish(root, image, disk_mib, key, progress)


async def build_scratch_rootfs(
    work_dir: Path, disk_mib: int, files: Mapping[str, Path], progress: Callable[[str], None] = lambda _: None
) -> Path:
    """An image that holds exactly `files` (path in the guest -> file of the host), each executable, and their folders.

    For images like "one static binary and nothing else". Not cached. Raises `ImageError`.
    """
    async with _scratch(work_dir, 0) as scratch:
        root = scratch / "root"
        await asyncio.to_thread(_copy_files, root, files)
        key = hashlib.sha256(scratch.name.encode()).hexdigest()[:12]
        return await _finish(root, work_dir / f"scratch-{key}.ext4", disk_mib, key, progress)


@asynccontextmanager
async def _scratch(work_dir: Path, needed_bytes: int) -> AsyncIterator[Path]:
    """A folder in `work_dir` that is gone afterwards, also after a cancel; after a kill -9, with the next build."""
    scratch, lock = await asyncio.to_thread(_make_scratch, work_dir, needed_bytes)
    try:
        yield scratch
    finally:
        # A cancel must not leave half a gigabyte: the removal goes on in its thread whatever happens to us.
        await asyncio.shield(asyncio.to_thread(_drop_scratch, scratch, lock))


def _make_scratch(work_dir: Path, needed_bytes: int) -> tuple[Path, int]:
    """A new folder and a descriptor that holds its lock, by which other builds know that it is in use."""
    work_dir.mkdir(parents=True, exist_ok=True)
    guard = os.open(work_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for stale in work_dir.glob(f"{_SCRATCH_PREFIX}*"):
            _drop_if_stale(stale)
        free, needed_mib = shutil.disk_usage(work_dir).free, needed_bytes >> 20
        if free < needed_bytes:
            raise StorageFull(f"{work_dir} has {free >> 20} MiB free; making the base template needs {needed_mib} MiB")
        scratch = Path(tempfile.mkdtemp(dir=work_dir, prefix=_SCRATCH_PREFIX))
        lock = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return scratch, lock
    finally:
        os.close(guard)


def _drop_if_stale(scratch: Path) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        lock = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os.close(lock)


def _drop_scratch(scratch: Path, lock: int) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    os.close(lock)


async def _bootstrap(root: Path, suite: str, sources: list[Source], progress: Callable[[str], None]) -> None:
    """Install the packages. `unshare` gives the tools process and mount namespaces that end with them.

    `setpriv` ends all of it when this process dies, however it dies.
    """
    progress(f"installing Debian {suite} and {len(PACKAGES)} packages from {sources[0].uri}")
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount-proc", "--pid", "--fork", "--kill-child"]
    command += ["mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase"]
    command += [f"--include={','.join(PACKAGES)}", '--aptopt=Apt::Install-Recommends "false"']
    command += ['--aptopt=Acquire::Languages "none"', *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS)]
    command += [f'--customize-hook=chroot "$1" {_USER_COMMAND}', suite, str(root), *(source.line for source in sources)]
    await run_command(command, BOOTSTRAP_DEADLINE_S, "install the packages of the base template", _told(progress))


def _told(progress: Callable[[str], None]) -> Callable[[str], None]:
    """mmdebstrap tells its steps as "I: ..."; the rest is the package tools' own chatter."""

    def on_line(line: str) -> None:
        if line.startswith("I: "):
            progress(line.removeprefix("I: "))

    return on_line


def _set_up(root: Path, suite: str) -> None:
    """Write our files and drop what only the installation needed. Never follows a link out of the tree."""
    for name, content in {**_FILES, "etc/apt/sources.list": guest_sources(suite)}.items():
        path = root / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(_MODES.get(name, 0o644))
    _resolve_own_name_first(root / "etc/nsswitch.conf")
    for pattern in ("etc/apt/sources.list.d/*", "var/cache/apt/*.bin", "var/cache/debconf/*-old", "var/log/*.log"):
        for leftover in root.glob(pattern):
            leftover.unlink(missing_ok=True)
    for pattern in ("var/lib/apt/lists/*", "var/cache/apt/archives/*"):
        for leftover in root.glob(pattern):
            if leftover.is_file():
                leftover.unlink()


def _resolve_own_name_first(nsswitch: Path) -> None:
    """The package puts `myhostname` behind `dns`, where it would only answer after a name server did."""
    lines = nsswitch.read_text().splitlines()
    nsswitch.write_text("".join(("hosts: files myhostname dns" if x.startswith("hosts:") else x) + "\n" for x in lines))


def _copy_files(root: Path, files: Mapping[str, Path]) -> None:
    root.mkdir()
    root.chmod(0o755)
    for name, source in files.items():
        relative = PurePosixPath(name.lstrip("/"))
        if ".." in relative.parts or not relative.parts:
            raise ImageError(f"{name!r} is no path of a file in the image")
        target = root / relative
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise ImageError(f"cannot copy {source} into the image: {error.strerror}") from error
        target.chmod(stat.S_IMODE(0o755))


async def _finish(root: Path, image: Path, disk_mib: int, key: str, progress: Callable[[str], None]) -> Path:
    """The tree as an image under its final name, which appears whole."""
    partial = root.parent / "image"
    await make_ext4(root, partial, disk_mib, key, progress)
    await asyncio.to_thread(partial.rename, image)
    size = (await asyncio.to_thread(os.stat, image)).st_blocks * 512
    progress(f"root file system ready: {image}, {size >> 20} MiB on disk")
    return image


def _key(suite: str, sources: list[Source], disk_mib: int) -> str:
    """12 hex digits over everything that decides the image's content."""
    inputs = [_RECIPE, suite, [source.line for source in sources], PACKAGES, _DPKG_OPTIONS, disk_mib]
    inputs += [_FILES, {name: oct(mode) for name, mode in _MODES.items()}, _USER_COMMAND, guest_sources(suite)]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
