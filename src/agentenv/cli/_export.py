"""Receiving an archive: beside its file first, so that nothing that is cut off ever has its name."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from agentenv.cli import streams
from agentenv.cli.progress import TransferBar, waiting
from agentenv.client import AenvClient


async def export(
    client: AenvClient, snapshot: str, output: str, *, compression: str | None, reference: str | None
) -> int:
    """Write the archive to the file `output`, or to standard output for `-`; gives its size in bytes.

    A file that is there is replaced when the archive is whole. Safe to cancel: nothing is left then.
    """
    with _opened(output) as descriptor:
        async with client.images.export(snapshot, compression=compression, reference=reference) as pieces:
            # The first piece comes when the server has made the whole archive.
            async with waiting(f"exporting {snapshot}"):
                first = await anext(pieces, b"")
            with TransferBar(output, None) as bar:
                return await _copy(_all(first, pieces), descriptor, bar)


@contextlib.contextmanager
def _opened(output: str) -> Iterator[int]:
    """A descriptor to write to; a regular file gets its name at the end, unless the block raises."""
    target = Path(output)
    if output == "-":
        yield sys.stdout.fileno()
    elif target.exists() and not target.is_file():
        # A device or a pipe is written to, never replaced.
        with target.open("wb") as file:
            yield file.fileno()
    else:
        partial = target.with_name(f".aenv-{secrets.token_hex(8)}")
        try:
            with partial.open("xb") as file:
                yield file.fileno()
            os.replace(partial, os.path.realpath(target) if target.is_symlink() else target)
        finally:
            partial.unlink(missing_ok=True)


async def _all(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _copy(pieces: AsyncIterator[bytes], descriptor: int, bar: TransferBar) -> int:
    size_bytes = 0
    async for piece in pieces:
        await streams.write(descriptor, piece)
        bar.advance(len(piece))
        size_bytes += len(piece)
    return size_bytes
