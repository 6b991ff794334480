"""The token dance: what a registry demands (WWW-Authenticate), and the Authorization that answers it.

Owns the challenges' grammar and the cache of tokens. Sends nothing itself: the caller passes a function that does, so
that deadlines and errors are handled in one place (`_http`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx

from agentenv.clock import Clock
from agentenv.errors import RegistryError
from agentenv.images.endpoints import Endpoint, is_loopback

# What a token lives where its service does not say (the distribution's token specification), and the time before
# its end at which a new one is taken.
TOKEN_S_DEFAULT: Final = 60.0
TOKEN_MARGIN_S: Final = 10.0
TOKEN_BYTES_MAX: Final = 1 << 20
_CLIENT_ID: Final = "agentenv"
_SCHEME: Final = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9!#$%&'*+.^_`|~-]*)(?:\s+|\s*$|\s*,)")
_PARAMETER: Final = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9_-]*)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]+))")

# Method, URL, query or form fields, headers -> status and body.
Ask = Callable[[str, str, Mapping[str, str], Mapping[str, str]], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Challenge:
    """One demand: `bearer` or `basic`, and its parameters."""

    scheme: str
    parameters: Mapping[str, str]


def parse_challenges(headers: Sequence[str]) -> list[Challenge]:
    """All challenges of the WWW-Authenticate headers; what cannot be read is left out."""
    found = []
    for header in headers:
        at = 0
        while scheme := _SCHEME.match(header, at):
            at, parameters = scheme.end(), {}
            while parameter := _PARAMETER.match(header, at):
                at = parameter.end()
                quoted = parameter[2]
                parameters[parameter[1].lower()] = parameter[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found.append(Challenge(scheme[1].lower(), parameters))
    return found


class Authenticator:
    """Answers challenges and remembers what was accepted, by place and repository. For one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[str, float]] = {}

    def known(self, endpoint: Endpoint, repository: str) -> str | None:
        """The Authorization that worked last time, while it lasts."""
        value, until = self._known.get((endpoint.base, repository), ("", 0.0))
        return value if self._clock.monotonic() < until else None

    def forget(self, endpoint: Endpoint, repository: str) -> None:
        """It was refused."""
        self._known.pop((endpoint.base, repository), None)

    async def answer(self, endpoint: Endpoint, repository: str, response: httpx.Response, ask: Ask) -> str | None:
        """The Authorization for a 401, or None where we have nothing to say. Raises `RegistryError`."""
        challenges = parse_challenges(response.headers.get_list("www-authenticate"))
        for challenge in challenges:
            if challenge.scheme == "bearer":
                value, lifetime_s = await self._token(endpoint, repository, challenge, ask)
                until = self._clock.monotonic() + max(lifetime_s - TOKEN_MARGIN_S, 1.0)
                self._known[endpoint.base, repository] = (value, until)
                return value
        if endpoint.credentials is not None and any(challenge.scheme == "basic" for challenge in challenges):
            value = endpoint.credentials.basic()
            self._known[endpoint.base, repository] = (value, float("inf"))
            return value
        return None

    async def _token(self, endpoint: Endpoint, repository: str, challenge: Challenge, ask: Ask) -> tuple[str, float]:
        realm = challenge.parameters.get("realm", "")
        _check_realm(endpoint, realm)
        fields = {"scope": challenge.parameters.get("scope") or f"repository:{endpoint.prefix}{repository}:pull"}
        if service := challenge.parameters.get("service"):
            fields["service"] = service
        who = endpoint.credentials
        if who is not None and who.identity_token:
            fields |= {"grant_type": "refresh_token", "refresh_token": who.identity_token, "client_id": _CLIENT_ID}
            status, body = await ask("POST", realm, fields, {})
        else:
            headers = {"Authorization": who.basic()} if who is not None else {}
            status, body = await ask("GET", realm, fields, headers)
        if status != 200:
            # The caller asks again without: the registry then tells what is missing.
            raise TokenRefused(f"{endpoint.host}: its token service {_host(realm)} answered {status}", status)
        return _read_token(body, f"{endpoint.host}: its token service {_host(realm)}")


class TokenRefused(Exception):
    """A token service said no; `status` tells whether to the credentials. Never leaves this package."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _check_realm(endpoint: Endpoint, realm: str) -> None:
    """Passwords go to the realm, so a registry with TLS must not lead them to a service without."""
    parts = urlsplit(realm)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RegistryError(f"{endpoint.host}: demands a token from {realm[:120]!r}, which is no address")
    if parts.scheme == "http" and not endpoint.is_plain and not is_loopback(parts.hostname):
        raise RegistryError(f"{endpoint.host}: demands a token from {parts.hostname} without encryption; refused")


def _host(realm: str) -> str:
    return urlsplit(realm).netloc


def _read_token(body: bytes, origin: str) -> tuple[str, float]:
    try:
        fields = json.loads(body)
        token = fields.get("token") or fields["access_token"]
        lifetime_s = float(fields.get("expires_in") or TOKEN_S_DEFAULT)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise RegistryError(f"{origin} answered without a token") from error
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise RegistryError(f"{origin} answered something that is no token")
    return f"Bearer {token}", lifetime_s
