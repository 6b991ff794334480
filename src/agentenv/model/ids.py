"""Identifiers. All are lower-case letters and digits without dashes, so that `{port}-{id}` host names split once."""

from __future__ import annotations

import re
import secrets
import uuid
from typing import Final

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
_RANDOM_CHARS: Final = 20

SANDBOX_ID_PATTERN: Final = re.compile(r"^i[a-z0-9]{20}$")


def _random_id(prefix: str) -> str:
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARS))


def new_sandbox_id() -> str:
    """A new sandbox id: `i` and 20 characters of [a-z0-9], the shape that E2B's own service uses."""
    return _random_id("i")


def new_snapshot_id() -> str:
    """A new snapshot (or template) id: `s` and 20 characters of [a-z0-9]."""
    return _random_id("s")


def new_build_id() -> str:
    """A new build id; a UUID, because the Python SDK parses it as one."""
    return str(uuid.uuid4())
