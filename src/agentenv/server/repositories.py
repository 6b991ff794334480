"""From a configuration to its repository: which store, with what it needs, and how long garbage stays in it.

Owns the look at a repository at the start of a server, so that what is configured wrongly is told then, by the name of
its setting, and not by the first pause.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.block import BlockClient
from agentenv.config import Config
from agentenv.errors import ConfigError, StoreRefused, StoreUnavailable
from agentenv.node.tokens import load_or_create_node_id
from agentenv.server.stores import StoresFile, encryption_key, oss_settings
from agentenv.snapshots import CommittedRepository, PosixStore, Process, Store
from agentenv.snapshots.opening import RepositoryOptions, open_repository
from agentenv.snapshots.sealing import check_key
from agentenv.snapshots.stores.interface import AccessDenied, NoBucket
from agentenv.snapshots.stores.oss import OssStore, Patience
from agentenv.snapshots.stores.probe import probe

# Grace of a repository that other nodes may share over a file system whose listings lag behind (NFS caches them).
SHARED_GRACE_S: Final = 300.0
# A server that starts has nobody who waits through an outage with it: its supervisor starts it again.
START_PATIENCE: Final = Patience(request_s_max=5.0, operation_s_max=15.0)


@dataclass(frozen=True, slots=True)
class Opened:
    """A repository, not loaded yet, and the store below it."""

    store: Store
    repository: CommittedRepository
    grace_s: float
    options: RepositoryOptions


def open_stores(config: Config) -> StoresFile:
    """STATE/stores.json, written. Raises `ConfigError`, `OperationFailed`."""
    entry = None
    if config.snapshot.backend == "oss":
        entry = oss_settings(config, os.environ, Path.home()).worker_entry()
    key = encryption_key(config.snapshot.encryption_key_file)
    file = StoresFile(config.server.state_dir / "stores.json", key, entry)
    file.write()
    return file


def open_configured(config: Config, block: BlockClient) -> Opened:
    """The repository that the configuration names. Raises `ConfigError`, `OperationFailed`."""
    state, snapshot = config.server.state_dir, config.snapshot
    store, location = _store(config)
    options = RepositoryOptions(
        state_dir=state,
        program=config.server.bin_dir / "aenv-storage",
        location=location,
        compression=None if snapshot.compression == "none" else snapshot.compression,
        encryption_key=encryption_key(snapshot.encryption_key_file),
    )
    process = Process(load_or_create_node_id(state / "node_id"))
    return Opened(store, open_repository(store, options, process, block), _grace_s(config), options)


async def check_configured(opened: Opened, patience: Patience = START_PATIENCE) -> None:
    """Make sure that the store does what a repository needs, lets this node do it, and is encrypted with its key.

    Raises `ConfigError` naming the setting, within seconds; `StoreUnavailable` and `RepositoryDamaged`.
    """
    store, location = opened.store, opened.options.location
    if isinstance(store, OssStore):
        store = OssStore(store.settings, patience)
        await _check_bucket(store, location)
    await check_key(store, opened.options.sealer(), location)


async def _check_bucket(store: OssStore, location: str) -> None:
    keys = store.settings.credentials
    try:
        await probe(store, location)
    except AccessDenied as error:
        whose = keys.origin if keys is not None else "this machine's identity"
        raise ConfigError(f"snapshot.oss: {error} (keys of: {whose}; see snapshot.oss.credentials_file)") from error
    except NoBucket as error:
        raise ConfigError(f"snapshot.oss.bucket: {error}") from error
    except StoreRefused as error:
        raise ConfigError(f"snapshot.oss.endpoint: {error}") from error
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error}; see snapshot.oss.endpoint, region and credentials_file") from error


def _store(config: Config) -> tuple[Store, str]:
    if config.snapshot.backend == "oss":
        settings = oss_settings(config, os.environ, Path.home())
        return OssStore(settings), settings.location
    return PosixStore(config.repository_dir), str(config.repository_dir)


def _grace_s(config: Config) -> float:
    """As configured; else none for a repository in the node's own state, which no other node shares."""
    if config.sources.get("snapshot.gc_grace_s", "default") != "default":
        return config.snapshot.gc_grace_s
    is_own = config.snapshot.backend == "posix_fs" and config.repository_dir.is_relative_to(config.server.state_dir)
    return 0.0 if is_own else SHARED_GRACE_S
