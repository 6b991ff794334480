"""Files that somebody else named: looked at before they are opened."""

from __future__ import annotations

import stat
from pathlib import Path

from agentenv.errors import ImageError, ImageNotFound


def regular_size(path: Path) -> int:
    """Bytes of a file. Raises `ImageNotFound`, and `ImageError` for what is no regular file: a pipe never ends."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageNotFound(f"{path} does not exist") from error
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{path}: not a regular file")
    return status.st_size
