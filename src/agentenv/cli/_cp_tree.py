"""Copying directories: as a tar stream through the sandbox's tar, else file by file; used by `cp`."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Final

from agentenv.cli import _tar, _unpack
from agentenv.cli.output import complain
from agentenv.cli.progress import TransferBar
from agentenv.client import Ended, EntryInfo, Process, Sandbox, Stderr, Stdout
from agentenv.client.errors import ClientError, TransportError
from agentenv.client.process import feed

PROBE_TIMEOUT_S: Final = 30.0
EXIT_NOT_FOUND: Final = 127
# What the sandbox's tar says about single files; more than this is cut.
COMPLAINT_BYTES_MAX: Final = 64 * 1024
FILES_AT_ONCE: Final = 8


class _Reports:
    """Reports failures as they come and remembers that there were some."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, path: str, reason: str) -> None:
        self.count += 1
        complain(f"{path}: {reason}")


async def upload(sandbox: Sandbox, user: str | None, source: Path, target: str) -> bool:
    """Copy the content of `source` into the remote directory `target`; False when something was reported."""
    reports = _Reports()
    await sandbox.files.make_directory(target, user=user)
    folder = (await sandbox.files.stat(target, user=user)).path
    if not await _has_tar(sandbox, user):
        await _upload_files(sandbox, user, source, folder, reports)
        return reports.count == 0
    # -o: the files belong to the user that unpacks them, not to a number of this machine.
    argv = ["tar", "-x", "-o", "-f", "-", "-C", folder]
    with TransferBar(str(source), None) as bar:
        async with sandbox.start(argv, user=user, stdin=True) as process:
            feeder = asyncio.create_task(feed(process, _counted(_tar.written(source, reports), bar)))
            try:
                ended = await _complaints(process, reports)
            finally:
                feeder.cancel()
                outcome = (await asyncio.gather(feeder, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise outcome
    _check_end(ended, reports, str(source))
    return reports.count == 0


async def download(sandbox: Sandbox, user: str | None, source: str, target: Path) -> bool:
    """Copy the content of the remote directory `source` into `target`; False when something was reported."""
    reports = _Reports()
    if not await _has_tar(sandbox, user):
        await _download_files(sandbox, user, source, target, reports)
        return reports.count == 0
    argv = ["tar", "-c", "-f", "-", "-C", source, "."]
    with TransferBar(source, None) as bar:
        async with sandbox.start(argv, user=user) as process:
            output = _Output(process, reports)
            await _unpack.unpack(_counted(output.stdout(), bar), target, reports)
            ended = output.ended
    if ended is None:
        raise ClientError("tar in the sandbox closed its output and went on")
    _check_end(ended, reports, source)
    return reports.count == 0


async def _has_tar(sandbox: Sandbox, user: str | None) -> bool:
    result = await sandbox.run(["tar", "--help"], user=user, timeout_s=PROBE_TIMEOUT_S)
    return result.exit_code != EXIT_NOT_FOUND


def _check_end(ended: Ended, reports: _Reports, path: str) -> None:
    if ended.exit_code != 0 and reports.count == 0:
        reports(path, f"tar in the sandbox failed with exit code {ended.exit_code}")


async def _counted(pieces: AsyncIterator[bytes], bar: TransferBar) -> AsyncIterator[bytes]:
    async for piece in pieces:
        bar.advance(len(piece))
        yield piece


class _Output:
    """The standard output of a tar as pieces; its standard error becomes reports."""

    def __init__(self, process: Process, reports: _Reports) -> None:
        self._process = process
        self._reports = reports
        self.ended: Ended | None = None

    async def stdout(self) -> AsyncIterator[bytes]:
        complaints = bytearray()
        async for event in self._process.events():
            if isinstance(event, Stdout):
                yield event.data
            elif isinstance(event, Stderr):
                complaints += event.data[: COMPLAINT_BYTES_MAX - len(complaints)]
            elif isinstance(event, Ended):
                self.ended = event
                if event.exit_code != 0:
                    _report_lines(bytes(complaints), self._reports)


async def _complaints(process: Process, reports: _Reports) -> Ended:
    """Wait for the end of a tar that unpacks."""
    output = _Output(process, reports)
    async for _ in output.stdout():
        pass
    assert output.ended is not None, "events() ends with Ended or raises"
    return output.ended


def _report_lines(text: bytes, reports: _Reports) -> None:
    for line in text.decode(errors="replace").splitlines():
        if line.strip():
            reports("sandbox", line)


# Without tar: one request per file, no symlinks


async def _upload_files(sandbox: Sandbox, user: str | None, source: Path, folder: str, reports: _Reports) -> None:
    from agentenv.cli._cp import Copier

    copier = Copier(sandbox, user, True)
    gate = asyncio.Semaphore(FILES_AT_ONCE)

    async def send(path: Path) -> None:
        async with gate:
            await _reported(copier.send_file(path, _remote(path, source, folder)), str(path), reports)

    for current, directories, files in os.walk(source, onerror=lambda error: reports(str(error.filename), str(error))):
        for name in directories:
            path = Path(current, name)
            if path.is_symlink():
                reports(str(path), "is a symlink; left out, because the sandbox has no tar")
            else:
                await sandbox.files.make_directory(_remote(path, source, folder), user=user)
        sending = []
        for name in files:
            path = Path(current, name)
            if path.is_symlink() or not path.is_file():
                reports(str(path), "is not a regular file; left out, because the sandbox has no tar")
            else:
                sending.append(send(path))
        await asyncio.gather(*sending)


def _remote(path: Path, source: Path, folder: str) -> str:
    return posixpath.join(folder, str(path.relative_to(source)))


async def _download_files(sandbox: Sandbox, user: str | None, source: str, target: Path, reports: _Reports) -> None:
    """Into a directory of ours alone, so plain paths are safe as long as names hold no slash."""
    from agentenv.cli._cp import receive_file

    target.mkdir(exist_ok=True)
    gate = asyncio.Semaphore(FILES_AT_ONCE)

    async def fetch(entry: EntryInfo, path: Path) -> None:
        async with gate:
            await _reported(receive_file(sandbox, user, entry, path), entry.path, reports)

    fetching = []
    for entry in await sandbox.files.list(source, user=user):
        if "/" in entry.name or entry.name in ("", ".", ".."):
            reports(entry.name, "refused: the name leads out of the directory")
        elif entry.symlink_target is not None:
            reports(entry.path, "is a symlink; left out, because the sandbox has no tar")
        elif entry.kind == "directory":
            await _download_files(sandbox, user, entry.path, target / entry.name, reports)
        elif entry.kind == "file":
            fetching.append(fetch(entry, target / entry.name))
        else:
            reports(entry.path, "is neither a file nor a directory; left out")
    await asyncio.gather(*fetching)


async def _reported(work: Awaitable[bool | None], path: str, reports: _Reports) -> None:
    try:
        if await work is False:
            reports.count += 1
    except TransportError:
        raise
    except ClientError as error:
        reports(path, str(error))
    except OSError as error:
        reports(path, error.strerror or str(error))
