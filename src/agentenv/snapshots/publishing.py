"""How a local layer becomes a blob of the repository, whatever that is: a link, a copy, an upload.

Owns the choice and the worker process; the facade owns holds and what is done when a sweep was faster. A publisher
returns when the blob is durable under its digest, and is idempotent: equal content is one blob.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from agentenv.errors import OperationFailed, RepositoryDamaged, StorageFull, StoreRefused, StoreUnavailable
from agentenv.model import Blob
from agentenv.snapshots.blobs import LAYERS, STATES, layer_key, state_key
from agentenv.snapshots.stores.files import translated
from agentenv.snapshots.stores.interface import OBJECT_BYTES_MAX, Store
from agentenv.snapshots.stores.posix import CannotLink, PosixStore

log = logging.getLogger(__name__)

# A worker that says nothing for so long hangs; it reports several times a second while it moves data.
SILENCE_S_MAX: Final = 300.0
KILL_S_MAX: Final = 5.0
# Each holds some parts of 64 MiB in memory and keeps a link busy.
WORKERS_MAX: Final = 4
_LINE_BYTES_MAX: Final = 1 << 20
_ERRORS: Final = {
    "no_space": StorageFull,
    "transient": StoreUnavailable,
    "denied": StoreRefused,
    "corrupt": RepositoryDamaged,
}


class WorkerFailed(OperationFailed):
    """aenv-storage ended with an error that no other class says; `kind` is its own word."""

    def __init__(self, message: str, kind: str = "unknown") -> None:
        super().__init__(message)
        self.kind = kind


class Publisher(Protocol):
    """Makes blobs. Raises `StorageFull`, `StoreUnavailable`, `StoreRefused` or `OperationFailed`; safe to cancel."""

    async def layer(self, local: Path) -> Blob:
        """Store a sealed layer's canonical bytes under `layers/`."""

    async def state(self, local: Path) -> Blob:
        """Store a device state under `states/`."""


class Digested(Protocol):
    """What blockd says of a layer's canonical bytes."""

    @property
    def digest(self) -> str:
        """sha256, 64 hexadecimal digits."""

    @property
    def size_bytes(self) -> int:
        """Their length."""


class Digester(Protocol):
    """blockd, as far as a publisher knows it."""

    async def digest(self, path: str | Path) -> Digested:
        """The digest of a sealed layer's canonical bytes, off the capture path."""


class StatePublisher:
    """Device states are small: they go through the store itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def state(self, local: Path) -> Blob:
        """See `Publisher.state`."""
        return await _put(self._store, local, state_key)


class PlainPublisher(StatePublisher):
    """Every file as it is, through the store: for stores in memory and small files. The fake of this module."""

    async def layer(self, local: Path) -> Blob:
        """See `Publisher.layer`."""
        return await _put(self._store, local, layer_key)


class LinkPublisher(StatePublisher):
    """A directory on the node's own file system: the layer gets a second name there, its digest. No byte is copied.

    What cannot be linked (another file system) goes to `otherwise`.
    """

    def __init__(self, store: PosixStore, digester: Digester, otherwise: Publisher | None = None) -> None:
        super().__init__(store)
        self._directory = store
        self._digester = digester
        self._otherwise = otherwise

    async def layer(self, local: Path) -> Blob:
        """See `Publisher.layer`."""
        digested = await self._digester.digest(local)
        blob = Blob(digested.digest, digested.size_bytes, digested.digest, digested.size_bytes)
        try:
            await self._directory.adopt(local, layer_key(blob.digest))
        except CannotLink:
            if self._otherwise is None:
                raise
            return await self._otherwise.layer(local)
        return blob


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How aenv-storage is started. Of `directory` and `store_name` exactly one is given."""

    program: Path
    stores_file: Path
    directory: Path | None = None
    store_name: str | None = None
    journal_dir: Path | None = None
    # "lz4", "zstd" or None.
    compression: str | None = None
    encrypt: bool = False

    def command(self, layer: Path) -> list[str]:
        """The arguments of the publication of a layer."""
        compress = ["--compress", self.compression] if self.compression else []
        return self._command("publish", "--layer", str(layer), "--prefix", LAYERS, *compress)

    def state_command(self, state: Path) -> list[str]:
        """The arguments of the publication of a device state, never compressed: nobody would unpack it."""
        return self._command("put-file", "--file", str(state), "--prefix", STATES)

    def _command(self, *subject: str) -> list[str]:
        target = ["--dir", str(self.directory)] if self.directory else ["--store", str(self.store_name)]
        command = [str(self.program), *subject, "--stores", str(self.stores_file), *target]
        if self.encrypt:
            command += ["--encrypt"]
        if self.journal_dir is not None:
            command += ["--journal-dir", str(self.journal_dir)]
        return command


class WorkerPublisher:
    """aenv-storage, one process per blob: other file systems, buckets, compression and encryption."""

    def __init__(
        self, options: WorkerOptions, store: Store, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._options = options
        self._states = StatePublisher(store)
        self._progress = progress
        self._slots = asyncio.Semaphore(WORKERS_MAX)

    async def layer(self, local: Path) -> Blob:
        """See `Publisher.layer`."""
        return await self._publish(self._options.command(local), self._options.compression)

    async def state(self, local: Path) -> Blob:
        """See `Publisher.state`. What is not to be encrypted goes through the store: without a process."""
        if not self._options.encrypt:
            return await self._states.state(local)
        return await self._publish(self._options.state_command(local), None)

    async def _publish(self, command: list[str], compression: str | None) -> Blob:
        async with self._slots:
            answer = await run_worker(command, self._progress)
        try:
            return Blob(
                digest=answer["digest"],
                size_bytes=answer["size_bytes"],
                plain_digest=answer["plain_digest"],
                plain_size_bytes=answer["plain_size_bytes"],
                blocks_digest=answer.get("blocks_digest"),
                encryption=answer.get("encryption"),
                compression=compression,
            )
        except KeyError as error:
            raise OperationFailed(f"aenv-storage {command[1]} answered without {error}") from error


async def run_worker(command: Sequence[str], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Run one aenv-storage to its end; returns its result. A cancel ends the process before it is passed on."""
    with translated(f"cannot start {command[0]}"):
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES_MAX,
        )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        out, failure = await asyncio.gather(process.stdout.read(), _follow(process.stderr, progress))
        status = await process.wait()
    except TimeoutError as error:
        raise StoreUnavailable(f"aenv-storage {command[1]} moved nothing for {SILENCE_S_MAX:g} s") from error
    finally:
        await _end(process)
    if status != 0:
        kind, message = failure or ("unknown", f"it ended with status {status}")
        told = f"aenv-storage {command[1]}: {message}"
        raise _ERRORS[kind](told) if kind in _ERRORS else WorkerFailed(told, kind)
    try:
        answer = msgspec.json.decode(out, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise OperationFailed(f"aenv-storage {command[1]} answered with nonsense") from error
    return answer


class _Said(msgspec.Struct):
    """A line of a worker's stderr."""

    done_bytes: int | None = None
    total_bytes: int | None = None
    error: dict[str, Any] | None = None


async def _follow(stream: asyncio.StreamReader, progress: Callable[[int, int], None] | None) -> tuple[str, str] | None:
    """Pass progress on until the worker closes its stderr; returns the kind and message of its error, if any."""
    failure = None
    while True:
        async with asyncio.timeout(SILENCE_S_MAX):
            line = await stream.readline()
        if not line:
            return failure
        try:
            said = msgspec.json.decode(line, type=_Said)
        except msgspec.MsgspecError:
            # A panic or a library's own words: for the log.
            log.warning("aenv-storage: %s", line.decode(errors="replace").rstrip())
            continue
        if said.error is not None:
            failure = (str(said.error.get("kind")), str(said.error.get("message")))
        elif progress is not None and said.done_bytes is not None:
            progress(said.done_bytes, said.total_bytes or 0)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Make sure that the process is gone; its journal lets the next one go on."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(KILL_S_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _put(store: Store, local: Path, key_of: Callable[[str], str]) -> Blob:
    content = await asyncio.to_thread(_read, local)
    digest = hashlib.sha256(content).hexdigest()
    # Unconditional: equal bytes replace themselves, and are as young as new ones, which keeps a sweep's grace away.
    await store.put(key_of(digest), content)
    return Blob(digest, len(content), digest, len(content))


def _read(path: Path) -> bytes:
    with translated(f"cannot read {path}"):
        size_bytes = path.stat().st_size
        if size_bytes > OBJECT_BYTES_MAX:
            raise OperationFailed(f"{path} has {size_bytes} bytes, more than {OBJECT_BYTES_MAX} go through a store")
        return path.read_bytes()
