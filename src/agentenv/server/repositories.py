"""Makes the repository of a configuration: its store, the way layers get into it, and the node's place in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.block import BlockClient
from agentenv.config import Config
from agentenv.node.tokens import load_or_create_node_id
from agentenv.server.stores import REPOSITORY, StoresFile, encryption_key, oss_settings
from agentenv.snapshots import (
    CommittedRepository,
    LinkPublisher,
    PosixStore,
    Process,
    Publisher,
    Staging,
    Store,
    WorkerChecker,
    WorkerOptions,
    WorkerPublisher,
)
from agentenv.snapshots.stores.oss import OssStore

# Grace of a repository that other nodes may share over a file system whose listings lag behind (NFS caches them).
SHARED_GRACE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A repository and what it is made of."""

    store: Store
    repository: CommittedRepository
    # For people: a path, or s3://bucket/prefix.
    location: str
    grace_s: float


def open_stores(config: Config) -> StoresFile:
    """STATE/stores.json, written. Raises `ConfigError`."""
    entry = None
    if config.snapshot.backend == "oss":
        entry = oss_settings(config, os.environ, Path.home()).worker_entry()
    file = StoresFile(
        config.server.state_dir / "stores.json", encryption_key(config.snapshot.encryption_key_file), entry
    )
    file.write()
    return file


def open_repository(config: Config, block: BlockClient, stores: StoresFile) -> Opened:
    """The repository, not loaded yet. Raises `ConfigError`, `OperationFailed`."""
    state = config.server.state_dir
    staging = Staging(state / "staging")
    process = Process(load_or_create_node_id(state / "node_id"))
    store, publisher, location = (
        _oss(config, stores) if config.snapshot.backend == "oss" else _posix(config, block, stores)
    )
    repository = CommittedRepository(
        store,
        publisher,
        staging,
        state / "blobs",
        process,
        checker=WorkerChecker(config.server.bin_dir / "aenv-storage", stores.path),
        digester=block,
        location=location,
    )
    return Opened(store, repository, location, _grace_s(config))


def _posix(config: Config, block: BlockClient, stores: StoresFile) -> tuple[Store, Publisher, str]:
    root = config.repository_dir
    store = PosixStore(root)
    worker = WorkerPublisher(_worker(config, stores, directory=root), store)
    is_plain = config.snapshot.compression == "none" and config.snapshot.encryption_key_file is None
    return store, LinkPublisher(store, block, worker) if is_plain else worker, str(root)


def _oss(config: Config, stores: StoresFile) -> tuple[Store, Publisher, str]:
    settings = oss_settings(config, os.environ, Path.home())
    store = OssStore(settings)
    return store, WorkerPublisher(_worker(config, stores, store_name=REPOSITORY), store), settings.location


def _worker(
    config: Config, stores: StoresFile, *, directory: Path | None = None, store_name: str | None = None
) -> WorkerOptions:
    compression = config.snapshot.compression
    return WorkerOptions(
        program=config.server.bin_dir / "aenv-storage",
        stores_file=stores.path,
        directory=directory,
        store_name=store_name,
        journal_dir=config.server.state_dir / "staging" / "uploads",
        compression=None if compression == "none" else compression,
        encrypt=config.snapshot.encryption_key_file is not None,
    )


def _grace_s(config: Config) -> float:
    """As configured; else none for a repository in the node's own state, which no other node shares."""
    if config.sources.get("snapshot.gc_grace_s", "default") != "default":
        return config.snapshot.gc_grace_s
    is_own = config.snapshot.backend == "posix_fs" and config.repository_dir.is_relative_to(config.server.state_dir)
    return 0.0 if is_own else SHARED_GRACE_S
