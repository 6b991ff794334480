"""Makes an ext4 image from a directory, without mounting anything on the host.

Owns the choice of ext4's features for our disks. Raw sparse files; blockd imports what is not zero.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

from agentenv.errors import ImageError
from agentenv.templates._command import run_command

DISK_MIB_MIN = 16
DISK_MIB_MAX = 1 << 20
# The guest writes its journal in a circle: a larger one is only more disk that every layer carries (the default would
# be 64 to 128). Ext4 refuses less than 4; 16 hold several seconds of metadata of a busy guest.
JOURNAL_MIB = 16
_JOURNAL_DISK_MIB_MIN = 128
MKE2FS_DEADLINE_S = 300.0
E2FSCK_DEADLINE_S = 300.0

_OPTIONS = (
    # Nothing left for the guest to zero in the background: that would dirty every clone's disk by megabytes. In a
    # sparse file that is as large as the file system from the start, discarding it makes the zeros cost nothing.
    "discard",
    "lazy_itable_init=0",
    "lazy_journal_init=0",
    "root_owner=0:0",
)


async def make_ext4(root: Path, image: Path, disk_mib: int, seed: str, progress: Callable[[str], None]) -> None:
    """Write `image` (which must not exist) with the content of `root`, owners, xattrs and links included.

    `seed` decides the file system's UUID and hash seed, so that equal inputs give equal metadata. Raises `ImageError`,
    also when the content does not fit. Cancelling it leaves a partial image, which the caller removes.
    """
    if not DISK_MIB_MIN <= disk_mib <= DISK_MIB_MAX:
        raise ImageError(f"a disk of {disk_mib} MiB is out of range: {DISK_MIB_MIN} to {DISK_MIB_MAX}")
    identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"aenv:{seed}"))
    journal = ["-J", f"size={JOURNAL_MIB}"] if disk_mib >= _JOURNAL_DISK_MIB_MIN else ["-O", "^has_journal"]
    command = [
        *("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "aenv-root"),
        *("-U", identity, "-E", ",".join((*_OPTIONS, f"hash_seed={identity}"))),
        *journal,
        *("-d", str(root), str(image)),
    ]
    await asyncio.to_thread(_create_sparse, image, disk_mib << 20)
    progress(f"writing an ext4 file system of {disk_mib} MiB")
    await run_command(command, MKE2FS_DEADLINE_S, "write the ext4 image")
    await run_command(["e2fsck", "-fn", str(image)], E2FSCK_DEADLINE_S, "check the ext4 image")


def _create_sparse(image: Path, size_bytes: int) -> None:
    try:
        with image.open("xb") as file:
            file.truncate(size_bytes)
    except OSError as error:
        raise ImageError(f"cannot create {image}: {error.strerror}") from error
