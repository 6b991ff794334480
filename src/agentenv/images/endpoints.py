"""Where a registry's content is asked for: its mirrors in order, then the registry itself, each with its credentials.

Pure but for the credentials' file. Says which of them may be spoken to without TLS: loopback, or what is configured.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agentenv.errors import ConfigError
from agentenv.images.credentials import AuthFile, Credentials
from agentenv.images.reference import DEFAULT_REGISTRY, RegistryReference

_DOCKER_HUB_HOST: Final = "registry-1.docker.io"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What is configured of one registry or mirror, by its host name with port."""

    # Where it really is, as `http://10.0.0.5:5000`; None: https at its name.
    url: str | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    # URLs or host names, asked in this order before the registry; a path becomes a prefix of the repository.
    mirrors: tuple[str, ...] = ()
    # Whether plain http is used (loopback always may).
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """What is configured of all registries."""

    hosts: Mapping[str, HostSettings] = field(default_factory=dict)
    # A file as `docker login` writes it.
    auth_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place to ask. `base` has no path and no trailing slash; `prefix` goes before the repository."""

    host: str
    base: str
    prefix: str
    is_mirror: bool
    credentials: Credentials | None

    def url(self, repository: str, rest: str) -> str:
        """The address of something of a repository, as `manifests/12`."""
        return f"{self.base}/v2/{self.prefix}{repository}/{rest}"

    @property
    def is_plain(self) -> bool:
        """Whether it speaks http, so that a redirect or a token service may too."""
        return self.base.startswith("http://")


def endpoints_of(reference: RegistryReference, settings: RegistrySettings) -> list[Endpoint]:
    """All places to ask, in order. Raises `ConfigError` naming the setting that is wrong."""
    auth_file = AuthFile(settings.auth_file)
    own = settings.hosts.get(reference.registry, HostSettings())
    found = []
    for mirror in own.mirrors:
        host, base, prefix = _place(mirror, settings.hosts)
        credentials = _credentials(host, prefix + reference.repository, settings.hosts, auth_file)
        found.append(Endpoint(host, base, prefix, True, credentials))
    credentials = _credentials(reference.registry, reference.repository, settings.hosts, auth_file)
    _, base, prefix = _place(own.url or reference.registry, settings.hosts)
    return [*found, Endpoint(reference.registry, base, prefix, False, credentials)]


def store_entry(reference: RegistryReference, settings: RegistrySettings) -> dict[str, str | None]:
    """The registry as `stores.json` names it, for daemons that read layers on demand (their source "registry")."""
    endpoint = endpoints_of(reference, settings)[-1]
    who = endpoint.credentials
    return {
        "url": endpoint.base,
        "username": who.username if who and who.username else None,
        "password": who.password if who and who.username else None,
    }


def is_loopback(host: str) -> bool:
    """Whether the host (without port) is this machine by its name or address alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _place(where: str, hosts: Mapping[str, HostSettings]) -> tuple[str, str, str]:
    """Host, base URL and repository prefix of a URL or host name."""
    has_scheme = "://" in where
    try:
        parts = urlsplit(where if has_scheme else f"//{where}")
        name, host = parts.hostname or "", parts.netloc
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"registries: {where!r} is not a URL or a host name ({error})") from error
    if not name or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"registries: {where!r} is not a URL or a host name without user and query")
    may_be_plain = is_loopback(name) or hosts.get(host, HostSettings()).insecure
    scheme = parts.scheme if has_scheme else "http" if may_be_plain else "https"
    if scheme not in ("http", "https"):
        raise ConfigError(f"registries: {where!r} must be http or https")
    if scheme == "http" and not may_be_plain:
        raise ConfigError(f"registries: {where!r} is not encrypted; set `insecure` for {host} if that is meant")
    prefix = parts.path.strip("/").removeprefix("v2").strip("/")
    base = f"{scheme}://{_DOCKER_HUB_HOST if host == DEFAULT_REGISTRY else host}"
    return host, base, f"{prefix}/" if prefix else ""


def _credentials(
    host: str, repository: str, hosts: Mapping[str, HostSettings], auth_file: AuthFile
) -> Credentials | None:
    """Explicit ones first."""
    configured = hosts.get(host)
    if configured is not None and configured.username:
        return Credentials(configured.username, configured.password)
    return auth_file.find(host, repository)
