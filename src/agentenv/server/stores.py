"""STATE/stores.json: what aenv-blockd and aenv-storage need to reach stores and registries, secrets included.

Owns the file (mode 0600, replaced whole; both programs read it again when it changes) and the two secrets of storage
that come out of files of their own: the S3 keys and the encryption key. Registries are added as images need them, and
stay, because disks that run read from them after the server that added them is gone.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.config import Config
from agentenv.errors import ConfigError
from agentenv.snapshots.opening import write_stores_file
from agentenv.snapshots.stores.credentials import find_credentials
from agentenv.snapshots.stores.oss import OssSettings


class StoresFile:
    """The file and what is in it."""

    def __init__(self, path: Path, encryption_key: str | None, repository: dict[str, Any] | None) -> None:
        self.path = path
        self._encryption_key = encryption_key
        self._repository = repository
        self._registries: dict[str, Any] = self._read().get("registries", {})

    def add_registry(self, name: str, entry: Mapping[str, Any]) -> None:
        """Make a registry known under its name (host and port). Written only if that changes something."""
        if self._registries.get(name) != dict(entry):
            self._registries[name] = dict(entry)
            self.write()

    def write(self) -> None:
        """Replace the file. Raises `StorageFull`, `OperationFailed`."""
        write_stores_file(
            self.path, repository=self._repository, registries=self._registries, encryption_key=self._encryption_key
        )

    def _read(self) -> dict[str, Any]:
        """What a former server left; a file that is no JSON is made anew."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def oss_settings(config: Config, environ: Mapping[str, str], home: Path) -> OssSettings:
    """[snapshot.oss] with keys found by the standard chain. Raises `ConfigError`."""
    oss = config.snapshot.oss
    chain = dict(environ)
    if oss.credentials_file is not None:
        if not oss.credentials_file.is_file():
            raise ConfigError(f"snapshot.oss.credentials_file: {oss.credentials_file} is not a file")
        chain = {"AWS_SHARED_CREDENTIALS_FILE": str(oss.credentials_file)}
    if oss.profile:
        chain["AWS_PROFILE"] = oss.profile
    addressing = oss.addressing
    if addressing == "auto":
        addressing = "path" if oss.endpoint else "virtual"
    return OssSettings(
        bucket=oss.bucket,
        region=oss.region,
        endpoint=oss.endpoint or None,
        addressing=addressing,
        prefix=oss.prefix,
        # An endpoint without TLS was written out by somebody.
        allow_http=oss.endpoint.startswith("http://"),
        credentials=find_credentials(None, chain, home),
    )


def encryption_key(path: Path | None) -> str | None:
    """The key of `snapshot.encryption_key_file`, 64 hex digits. Raises `ConfigError` naming the setting."""
    if path is None:
        return None
    where = f"snapshot.encryption_key_file: {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor) as file:
            status = os.fstat(file.fileno())
            text = file.read(256).strip().lower()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{where} must be readable by its owner alone (chmod 600)")
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ConfigError(f"{where} does not hold 64 hexadecimal digits (make one with: openssl rand -hex 32)")
    return text
