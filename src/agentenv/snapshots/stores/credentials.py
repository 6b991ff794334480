"""Where the keys of an S3 store come from: the configuration, else the environment, else the shared files of a profile.

What is left of the usual chain (web identity, container, instance metadata) hands out keys that expire, so it is
followed by the S3 client itself, which is told nothing. The shared files are read here because that client does not
know them; their `credential_process` and `sso_*` settings are not run. Pure but for reading the two files.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys that do not expire by themselves. Not shown by `repr`."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    # "configuration", "environment" or "profile NAME", for people.
    origin: str = "configuration"


def find_credentials(configured: Credentials | None, environ: Mapping[str, str], home: Path) -> Credentials | None:
    """The first keys of the chain; None leaves it to the client. Raises `ConfigError` for a file that is malformed."""
    if configured is not None:
        return configured
    key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        return Credentials(key, secret, environ.get("AWS_SESSION_TOKEN") or None, "environment")
    return _of_profile(environ, home)


def _of_profile(environ: Mapping[str, str], home: Path) -> Credentials | None:
    profile = environ.get("AWS_PROFILE") or "default"
    shared = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    config = Path(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
    # In the second file every profile but the default one has a prefix.
    places = ((shared, profile), (config, profile if profile == "default" else f"profile {profile}"))
    for path, section in places:
        found = _section(path, section)
        key, secret = found.get("aws_access_key_id"), found.get("aws_secret_access_key")
        if key and secret:
            return Credentials(key, secret, found.get("aws_session_token") or None, f"profile {profile}")
    if environ.get("AWS_PROFILE") and not any(_section(path, section) for path, section in places):
        raise ConfigError(f"AWS_PROFILE names {profile!r}, which is neither in {shared} nor in {config}")
    return None


def _section(path: Path, section: str) -> Mapping[str, str]:
    """One section of an INI file, empty where the file or the section is missing."""
    parser = configparser.ConfigParser(interpolation=None, strict=False, default_section="\0")
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return {}
    except (configparser.Error, UnicodeDecodeError) as error:
        # Without its cause: that quotes the line, which may be a secret.
        raise ConfigError(f"{path}: not a file of AWS profiles ({type(error).__name__})") from None
    return parser[section] if parser.has_section(section) else {}
