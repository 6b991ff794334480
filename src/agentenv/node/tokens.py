"""Secrets of sandboxes, derived from one secret of the node, so that they survive every pause and restart.

A fork gets tokens of its own, because they derive from the id. API keys never come near this: trust boundaries apart.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from agentenv.errors import ConfigError

_SECRET_BYTES: Final = 32
_TOKEN_HEX_CHARS: Final = 40
_NODE_ID_HEX_CHARS: Final = 20


def load_or_create_secret(path: Path) -> bytes:
    """The node's secret; made at the first start, mode 0600. Raises `ConfigError` for a file that others may read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read_secret(path)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return _read_secret(path)


def load_or_create_node_id(path: Path) -> str:
    """Who this node is among those that share its repository; made at the first start. Not a secret.

    Raises `ConfigError` for a file that holds something else: two nodes of one id would take each other's things.
    """
    try:
        with path.open("x") as file:
            file.write(f"n{secrets.token_hex(_NODE_ID_HEX_CHARS // 2)}\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        pass
    node_id = path.read_text().strip()
    if not re.fullmatch(r"n[0-9a-f]{20}", node_id):
        raise ConfigError(f"{path} does not hold a node's id (n and 20 hexadecimal digits); restore it from a backup")
    return node_id


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{path} must belong to this user and be readable by nobody else (chmod 600)")
        text = file.read().strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(f"{path} does not hold {_SECRET_BYTES} bytes in hexadecimal; restore it from a backup")
    return secret


class Tokens:
    """Derives tokens. HMAC-SHA256 (RFC 2104) over a purpose and the sandbox id."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def envd(self, sandbox_id: str) -> str:
        """The access token of the sandbox's guest daemon."""
        return self._derive("envd", sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """The token that private ingress asks for."""
        return self._derive("traffic", sandbox_id)

    def _derive(self, purpose: str, sandbox_id: str) -> str:
        digest = hmac.new(self._secret, f"{purpose}:{sandbox_id}".encode(), hashlib.sha256)
        return digest.hexdigest()[:_TOKEN_HEX_CHARS]
