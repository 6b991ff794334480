"""Putting a node's repository together: which publisher and checker go with which store, and stores.json.

Owns the file by which aenv-blockd and aenv-storage learn how to reach stores (it holds secrets, so it is 0600 and is
replaced whole). Does not own settings: the server hands them in.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.snapshots.checking import WorkerChecker
from agentenv.snapshots.committed import CommittedRepository
from agentenv.snapshots.gclock import Process
from agentenv.snapshots.publishing import Digester, LinkPublisher, Publisher, WorkerOptions, WorkerPublisher
from agentenv.snapshots.sealing import Sealer
from agentenv.snapshots.staging import Staging
from agentenv.snapshots.states import WorkerFetcher
from agentenv.snapshots.stores.files import translated
from agentenv.snapshots.stores.interface import Store
from agentenv.snapshots.stores.posix import PosixStore

STORE_NAME = "repository"


@dataclass(frozen=True, slots=True)
class RepositoryOptions:
    """Where a node keeps its side of a repository, and how it publishes."""

    state_dir: Path
    # The program aenv-storage.
    program: Path
    # For people: a directory, or `s3://bucket/prefix`.
    location: str
    # "lz4", "zstd" or None.
    compression: str | None = None
    # 64 hexadecimal digits; None: nothing is encrypted.
    encryption_key: str | None = field(default=None, repr=False)

    @property
    def stores_file(self) -> Path:
        """STATE/stores.json."""
        return self.state_dir / "stores.json"

    def sealer(self) -> Sealer | None:
        """What seals secrets in manifests; None without a key."""
        return None if self.encryption_key is None else Sealer(self.encryption_key)


def open_repository(
    store: Store, options: RepositoryOptions, process: Process, digester: Digester
) -> CommittedRepository:
    """The repository of one node; `load` it before use. Raises `StorageFull` or `OperationFailed` for STATE/staging."""
    return CommittedRepository(
        store,
        _publisher(store, options, digester),
        Staging(options.state_dir / "staging"),
        options.state_dir / "blobs",
        process,
        checker=WorkerChecker(options.program, options.stores_file),
        digester=digester,
        fetcher=WorkerFetcher(options.program, options.stores_file),
        sealer=options.sealer(),
        location=options.location,
    )


def _publisher(store: Store, options: RepositoryOptions, digester: Digester) -> Publisher:
    directory = store.root if isinstance(store, PosixStore) else None
    worker = WorkerPublisher(
        WorkerOptions(
            program=options.program,
            stores_file=options.stores_file,
            directory=directory,
            store_name=None if directory else STORE_NAME,
            journal_dir=options.state_dir / "staging" / "uploads",
            compression=options.compression,
            encrypt=options.encryption_key is not None,
        ),
        store,
    )
    if isinstance(store, PosixStore) and options.compression is None and options.encryption_key is None:
        # Another file system is found out at the first link.
        return LinkPublisher(store, digester, otherwise=worker)
    return worker


def write_stores_file(
    path: Path,
    *,
    repository: Mapping[str, Any] | None,
    registries: Mapping[str, Mapping[str, Any]],
    encryption_key: str | None,
) -> None:
    """Replace stores.json. `repository` is `OssSettings.worker_entry()`, None for a directory.

    Workers read it again when it changes. Raises `StorageFull` or `OperationFailed`.
    """
    document = {
        "stores": {} if repository is None else {STORE_NAME: dict(repository)},
        "registries": {host: dict(registry) for host, registry in registries.items()},
        "encryption_key": encryption_key,
    }
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with translated(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
