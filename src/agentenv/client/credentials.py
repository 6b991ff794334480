"""Where the server is and with which key: options, environment, then the file that `aenv auth` writes.

Owns the order of these sources and the file's safety; knows nothing of HTTP. The file's key belongs to the file's
URL and is never sent to another one; a key of the environment that was meant for E2B is never sent to the file's URL.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agentenv.client.errors import ConfigurationError

DEFAULT_API_URL: Final = "http://127.0.0.1:8000"
FILE_BYTES_MAX: Final = 64 * 1024
KEY_CHARS_MAX: Final = 4096
_FIELDS: Final = ("api_url", "api_key", "sandbox_url")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client needs, and for each value the source it came from (for `aenv auth --show`)."""

    api_url: str
    api_key: str | None
    sandbox_url: str
    api_url_source: str = "given"
    api_key_source: str = "given"
    sandbox_url_source: str = "given"


def checked_url(value: str, source: str) -> str:
    """`value` without trailing slashes. Raises `ConfigurationError` unless it is a plain http or https URL."""
    url = value.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{source}: {value!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{source}: {value!r} is not a URL of the form http://host:port")
    if parts.username is not None or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise ConfigurationError(f"{source}: the URL must hold no user, query, fragment or space")
    return url


def checked_key(value: str, source: str) -> str:
    """`value` without surrounding space. Raises `ConfigurationError`, never with the key in it."""
    key = value.strip()
    if not key:
        raise ConfigurationError(f"{source}: the API key is empty")
    if len(key) > KEY_CHARS_MAX or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError(
            f"{source}: the API key must be up to {KEY_CHARS_MAX} printable ASCII characters without spaces"
        )
    return key


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_CONFIG_HOME/aenv/credentials.toml`, by default in ~/.config."""
    env = os.environ if environ is None else environ
    configured = env.get("XDG_CONFIG_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path("~/.config").expanduser()
    return base / "aenv" / "credentials.toml"


def resolve(
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    sandbox_url: str | None = None,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Credentials:
    """The effective credentials: each argument if given, else AENV_*, else E2B_*, else the file.

    Without any URL the default is `http://127.0.0.1:8000`; without a sandbox URL it is the API URL, whose proxy
    routes by header. Raises `ConfigurationError` for a value or a file that cannot be used.
    """
    env = os.environ if environ is None else environ
    location = default_path(env) if path is None else path
    stored = read_file(location)
    file_name = str(location)

    url, url_source = _first(
        ("--api-url", api_url),
        ("AENV_API_URL", env.get("AENV_API_URL")),
        ("E2B_API_URL", env.get("E2B_API_URL")),
        (file_name, stored.get("api_url")),
        ("default", DEFAULT_API_URL),
    )
    url = checked_url(url or DEFAULT_API_URL, url_source)
    is_file_url = stored.get("api_url", "").rstrip("/") == url
    # A URL that came from the file goes with the file's key: E2B_API_KEY alone is one for E2B's own service.
    key, key_source = _first(
        ("--api-key", api_key),
        ("AENV_API_KEY", env.get("AENV_API_KEY")),
        ("E2B_API_KEY", env.get("E2B_API_KEY") if url_source != file_name else None),
        (file_name, stored.get("api_key") if is_file_url else None),
        ("none", None),
    )
    sandbox, sandbox_source = _first(
        ("sandbox_url", sandbox_url),
        ("AENV_SANDBOX_URL", env.get("AENV_SANDBOX_URL")),
        ("E2B_SANDBOX_URL", env.get("E2B_SANDBOX_URL")),
        (file_name, stored.get("sandbox_url") if is_file_url else None),
        ("the API URL", url),
    )
    return Credentials(
        api_url=url,
        api_key=checked_key(key, key_source) if key else None,
        sandbox_url=checked_url(sandbox or url, sandbox_source),
        api_url_source=url_source,
        api_key_source=key_source,
        sandbox_url_source=sandbox_source,
    )


def _first(*candidates: tuple[str, str | None]) -> tuple[str | None, str]:
    """The first value that is neither None nor empty, with its source; the last candidate when there is none."""
    for source, value in candidates:
        if value:
            return value, source
    source, value = candidates[-1]
    return value, source


def read_file(path: Path) -> dict[str, str]:
    """The stored values, empty when there is no file.

    Raises `ConfigurationError` for a symlink, a file of another user, one that others may read, or one that is not
    the TOML that `write_file` makes: a secret that others could have read or replaced is not used in silence.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be opened safely: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{path}: is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigurationError(f"{path}: belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            raise ConfigurationError(f"{path}: others may read it; run: chmod 600 {path}")
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigurationError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    return _parsed(data, path)


def _parsed(data: bytes, path: Path) -> dict[str, str]:
    try:
        values = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path}: is not valid TOML: {error}") from error
    for name, value in values.items():
        if name not in _FIELDS or not isinstance(value, str):
            raise ConfigurationError(f"{path}: unknown key or wrong type: {name} (allowed: {', '.join(_FIELDS)})")
    return values


def write_file(path: Path, *, api_url: str, api_key: str, sandbox_url: str | None = None) -> None:
    """Replace the file atomically: readers see the old one or the new one, and it is 0600 from its first byte.

    Raises `ConfigurationError` when the path is a symlink or cannot be written.
    """
    lines = [f"api_url = {json.dumps(api_url)}", f"api_key = {json.dumps(api_key)}"]
    if sandbox_url:
        lines.append(f"sandbox_url = {json.dumps(sandbox_url)}")
    data = ("\n".join(lines) + "\n").encode()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            raise ConfigurationError(f"{path}: is a symlink; remove it first")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(path: Path) -> bool:
    """Remove the file; False when there was none. Raises `ConfigurationError`."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be removed: {error.strerror}") from error
    return True
