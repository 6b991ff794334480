"""Named network namespaces under /run/netns, as `ip netns` makes them, without a process per call.

Owns making, entering and removing a namespace. A namespace belongs to a *thread*: each entry uses a thread of its own
that ends afterwards, so no thread of the server can ever be left inside a slot.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NETNS_DIR = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 4096, 16384, 1 << 20
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _mount(source: str, target: Path, flags: int) -> None:
    _check(_libc.mount(source.encode(), bytes(target), b"none", flags, None), "mount")


def prepare_directory() -> None:
    """Make /run/netns a shared mount, as iproute2 does: what is removed here is then gone in every mount namespace."""
    NETNS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        _mount("", NETNS_DIR, _MS_SHARED | _MS_REC)
    except OSError as error:
        # EINVAL: it is not a mount point yet.
        if error.errno != errno.EINVAL:
            raise
        _mount(str(NETNS_DIR), NETNS_DIR, _MS_BIND | _MS_REC)
        _mount("", NETNS_DIR, _MS_SHARED | _MS_REC)


def _in_own_thread(work: Callable[[], T]) -> T:
    """Run `work` in a new thread and hand over what it returns or raises."""
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # handed to the caller's thread, whatever it is
            failures.append(error)

    thread = threading.Thread(target=body, name="netns")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def create(name: str, work: Callable[[], T]) -> T:
    """Make the namespace `name` and run `work` in it. Raises OSError (EEXIST when there is one); undoes nothing."""
    path = NETNS_DIR / name

    def body() -> T:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o444))
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        _mount(f"/proc/self/task/{threading.get_native_id()}/ns/net", path, _MS_BIND)
        return work()

    return _in_own_thread(body)


def run_in(name: str, work: Callable[[], T]) -> T:
    """Run `work` in the namespace `name`. Raises OSError when it does not exist."""

    def body() -> T:
        descriptor = os.open(NETNS_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(descriptor, _CLONE_NEWNET), "setns")
        finally:
            os.close(descriptor)
        return work()

    return _in_own_thread(body)


def remove(name: str) -> None:
    """Remove the name; the kernel takes the namespace down when no process is left in it. Repeating it is fine."""
    path = NETNS_DIR / name
    if _libc.umount2(bytes(path), _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        # EINVAL: a plain file, left by a creation that died before the mount. ENOENT: gone already.
        if number not in (errno.EINVAL, errno.ENOENT):
            raise OSError(number, f"umount {path}: {os.strerror(number)}")
    path.unlink(missing_ok=True)


def names(prefix: str) -> list[str]:
    """All namespaces whose name starts with `prefix`, also half-made ones."""
    if not NETNS_DIR.is_dir():
        return []
    return sorted(entry.name for entry in NETNS_DIR.iterdir() if entry.name.startswith(prefix))
