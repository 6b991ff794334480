"""Which name servers a guest is given when none are configured: those of the host, else public ones."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address
from pathlib import Path

PUBLIC_RESOLVERS = ("1.1.1.1", "8.8.8.8")
# A guest's resolver asks no more than three.
RESOLVER_COUNT_MAX = 3
# The second one holds the real servers behind systemd-resolved's local stub.
RESOLVER_FILES = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))


def parse_resolvers(text: str) -> list[str]:
    """The IPv4 name servers in a resolv.conf that a guest could reach: loopback ones and IPv6 are left out."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or words[0] != "nameserver":
            continue
        try:
            address = IPv4Address(words[1])
        except ValueError:
            continue
        if not address.is_loopback and not address.is_unspecified:
            found.append(str(address))
    return found[:RESOLVER_COUNT_MAX]


def host_resolvers(files: Iterable[Path] = RESOLVER_FILES) -> tuple[str, ...]:
    """The first file that names a usable server decides."""
    for path in files:
        try:
            found = parse_resolvers(path.read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return tuple(found)
    return PUBLIC_RESOLVERS
