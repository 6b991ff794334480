"""Who we are to a registry: from explicit settings, else from a file as `docker login` writes it.

Owns reading that file. Never runs a credential helper (`credHelpers`, `credsStore`): they are programs of a person's
session, and a node runs none that a file names.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentenv.errors import ConfigError
from agentenv.images.reference import DEFAULT_REGISTRY

AUTH_FILE_BYTES_MAX: Final = 1 << 20
# What `docker login` calls Docker Hub.
_DOCKER_HUB_KEYS: Final = frozenset({"index.docker.io", "registry-1.docker.io"})


@dataclass(frozen=True, slots=True)
class Credentials:
    """A name with a password, or an identity token, which is traded for access tokens. Never shown in a repr."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class AuthFile:
    """A file like ~/.docker/config.json, read again at each use: a login must not need a restart."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def find(self, host: str, repository: str) -> Credentials | None:
        """The credentials of the longest entry that covers `host/repository`. Raises `ConfigError` naming the file."""
        auths = self._auths()
        wanted = f"{host}/{repository}"
        while True:
            if (entry := auths.get(wanted)) is not None:
                return _credentials(entry, f"{self._path}: auths.{wanted}")
            wanted, slash, _ = wanted.rpartition("/")
            if not slash:
                return None

    def _auths(self) -> Mapping[str, Any]:
        if self._path is None:
            return {}
        try:
            if self._path.stat().st_size > AUTH_FILE_BYTES_MAX:
                raise ConfigError(f"{self._path}: more than {AUTH_FILE_BYTES_MAX} bytes")
            body = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            # Nobody has logged in yet.
            return {}
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{self._path}: not JSON ({error})") from error
        auths = body.get("auths") if isinstance(body, dict) else None
        return {_host_key(key): entry for key, entry in auths.items()} if isinstance(auths, dict) else {}


def _host_key(key: str) -> str:
    """`https://index.docker.io/v1/` and `ghcr.io/owner` are both keys that are in use."""
    bare = key.removeprefix("https://").removeprefix("http://").rstrip("/")
    for version in ("/v1", "/v2"):
        bare = bare.removesuffix(version)
    return DEFAULT_REGISTRY if bare in _DOCKER_HUB_KEYS else bare


def _credentials(entry: object, origin: str) -> Credentials | None:
    if not isinstance(entry, dict):
        raise ConfigError(f"{origin}: not an object")
    username, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            decoded = base64.b64decode(str(entry["auth"]), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{origin}: `auth` is not base64 of name:password") from error
        # docker pads old entries with NULs.
        username, _, password = decoded.rstrip("\0").partition(":")
    token = str(entry.get("identitytoken") or "")
    # An empty entry means that a helper has the password.
    return Credentials(username, password, token) if username or token else None
