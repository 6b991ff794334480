"""Copying single files, and choosing the way for directories; used by `cp`."""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from agentenv.cli import _cp_tree, streams
from agentenv.cli.cp import Place
from agentenv.cli.output import complain
from agentenv.cli.progress import TransferBar
from agentenv.cli.session import open_running, run
from agentenv.cli.settings import Settings
from agentenv.client import AenvClient, EntryInfo, Sandbox
from agentenv.client.errors import ClientError, NotFound, TransportError

READ_BYTES: Final = 256 * 1024
CHMOD_TIMEOUT_S: Final = 30.0


def copy(settings: Settings, sources: Sequence[Place], destination: Place, *, recursive: bool, user: str | None) -> int:
    """Copy every source; gives 0, or 1 when something was reported as not copied."""
    sandbox_id = destination.sandbox_id or sources[0].sandbox_id
    assert sandbox_id is not None

    async def work(client: AenvClient) -> int:
        sandbox = await open_running(client, sandbox_id)
        copier = Copier(sandbox, user, recursive)
        outcomes = [await copier.one(source, destination, len(sources) > 1) for source in sources]
        return 0 if all(outcomes) else 1

    return run(settings, work)


class Copier:
    """Copies between this machine and one sandbox."""

    def __init__(self, sandbox: Sandbox, user: str | None, recursive: bool) -> None:
        self._sandbox = sandbox
        self._user = user
        self._recursive = recursive

    async def one(self, source: Place, destination: Place, into_directory: bool) -> bool:
        """Copy one source; False when it failed, which has been reported. A broken connection ends everything."""
        try:
            if destination.sandbox_id is None:
                return await self._download(source.path, destination, into_directory)
            return await self._upload(source, destination.path, into_directory)
        except TransportError:
            raise
        except ClientError as error:
            complain(f"{source}: {error}")
        except BrokenPipeError:
            raise
        except OSError as error:
            complain(f"{error.filename or source}: {error.strerror}")
        return False

    # Up

    async def _upload(self, source: Place, target: str, into_directory: bool) -> bool:
        if source.is_stream:
            await self._send("standard input", target, _standard_input(), None)
            return True
        status = os.stat(source.path)
        if stat.S_ISDIR(status.st_mode) and not self._recursive:
            complain(f"{source}: is a directory (-r copies directories)")
            return False
        target = await self._remote_target(source.path, target, into_directory)
        if stat.S_ISDIR(status.st_mode):
            return await _cp_tree.upload(self._sandbox, self._user, Path(source.path), target)
        return await self.send_file(Path(source.path), target)

    async def _remote_target(self, source: str, target: str, into_directory: bool) -> str:
        """Where the source ends up: in `target` if that is a directory, else at it, as `cp` does."""
        name = os.path.basename(source.rstrip("/"))
        try:
            entry = await self._sandbox.files.stat(target, user=self._user)
            is_directory = entry.kind == "directory"
        except NotFound:
            is_directory = False
        if into_directory and not is_directory:
            raise ClientError(f"{target} is not a directory in the sandbox")
        if not is_directory and not target.endswith("/"):
            return target
        # `cp -r . ID:/x` means the content, and so does `dir/.`.
        return posixpath.join(target, name) if name not in ("", ".", "..") else target

    async def send_file(self, path: Path, target: str) -> bool:
        """Upload one file and give it the permission to be executed if it has it here."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # Pipes and devices do not know their length.
            size = status.st_size if stat.S_ISREG(status.st_mode) else None
            entry = await self._send(str(path), target, _pieces_of(file.fileno()), size)
        wanted = stat.S_IMODE(status.st_mode) & 0o777
        if size is None or not (entry.mode ^ wanted) & 0o111:
            return True
        argv = ["chmod", f"{wanted:o}", entry.path]
        result = await self._sandbox.run(argv, user=self._user, timeout_s=CHMOD_TIMEOUT_S)
        if result.exit_code != 0:
            complain(f"{path}: copied, but without its permissions: {result.stderr.decode(errors='replace')}")
        return result.exit_code == 0

    async def _send(self, label: str, target: str, pieces: AsyncIterator[bytes], size: int | None) -> EntryInfo:
        with TransferBar(label, size) as bar:
            return await self._sandbox.files.write(target, _counted(pieces, bar), size_bytes=size, user=self._user)

    # Down

    async def _download(self, path: str, destination: Place, into_directory: bool) -> bool:
        if destination.is_stream:
            return await self._to_stream(path)
        entry = await self._sandbox.files.stat(path, user=self._user)
        if entry.kind == "directory" and not self._recursive:
            complain(f"{path}: is a directory (-r copies directories)")
            return False
        target = _local_target(path, destination.path, into_directory)
        if entry.kind == "directory":
            return await _cp_tree.download(self._sandbox, self._user, entry.path, target)
        await receive_file(self._sandbox, self._user, entry, target)
        return True

    async def _to_stream(self, path: str) -> bool:
        out = sys.stdout.buffer
        async with self._sandbox.files.open(path, user=self._user) as pieces:
            async for piece in pieces:
                out.write(piece)
        out.flush()
        return True


def _local_target(path: str, destination: str, into_directory: bool) -> Path:
    """Where a remote path ends up here: in `destination` if that is a directory, else at it."""
    name = posixpath.basename(path.rstrip("/"))
    target = Path(destination)
    if target.is_dir():
        return target / name if name not in ("", ".", "..", "~") else target
    if into_directory or destination.endswith("/"):
        raise NotADirectoryError(20, "is not a directory", destination)
    return target


async def receive_file(sandbox: Sandbox, user: str | None, entry: EntryInfo, target: Path) -> None:
    """Download one file: beside the target first, so that a broken transfer leaves the old content in place."""
    async with sandbox.files.open(entry.path, user=user) as pieces:
        with TransferBar(entry.path, entry.size_bytes or None) as bar:
            if target.exists() and not target.is_file():
                # A device or a pipe is written to, never replaced.
                with target.open("wb") as file:
                    await _drain(_counted(pieces, bar), file.fileno())
                return
            partial = target.with_name(f".aenv-{secrets.token_hex(8)}")
            try:
                with partial.open("xb") as file:
                    await _drain(_counted(pieces, bar), file.fileno())
                    os.fchmod(file.fileno(), entry.mode & 0o777 & ~_umask())
                # A symlink stays one: its target gets the content.
                os.replace(partial, os.path.realpath(target) if target.is_symlink() else target)
            finally:
                partial.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


async def _drain(pieces: AsyncIterator[bytes], descriptor: int) -> None:
    async for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(descriptor, view) :]


async def _counted(pieces: AsyncIterator[bytes], bar: TransferBar) -> AsyncIterator[bytes]:
    async for piece in pieces:
        bar.advance(len(piece))
        yield piece


async def _pieces_of(descriptor: int) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(os.read, descriptor, READ_BYTES):
        yield data


async def _standard_input() -> AsyncIterator[bytes]:
    descriptor = streams.input_descriptor()
    if descriptor is None:
        yield sys.stdin.buffer.read() if sys.stdin is not None else b""
        return
    async for piece in streams.pieces(descriptor):
        yield piece
