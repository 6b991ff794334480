"""A folder for the files of one piece of work, gone with it whatever ends the work.

A kill leaves it; the node removes what is there at its next start.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.errors import ImageError, StorageFull
from agentenv.images._threads import to_its_end


@asynccontextmanager
async def staging_folder(parent: Path) -> AsyncIterator[Path]:
    """A new folder for the length of the block. Raises `StorageFull`, `ImageError`. A cancel removes it first."""
    folder = parent / secrets.token_hex(12)
    try:
        await to_its_end(_make, folder)
        yield folder
    finally:
        await to_its_end(shutil.rmtree, folder, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{folder} cannot be made: the disk is full") from error
        raise ImageError(f"{folder} cannot be made: {error.strerror}") from error
