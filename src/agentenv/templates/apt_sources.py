"""Where the host gets Debian from: its suite, and the mirrors in its apt configuration. Reads these files only.

Only Debian's own archives count. Third-party sources of the host (a cloud's tools, Node's own builds) must not leak
into a template that users take for plain Debian.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import HostUnsuitable

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEFAULT_MIRROR = "http://deb.debian.org/debian"
SECURITY_MIRROR = "http://deb.debian.org/debian-security"
# The releases whose kernel, tools and guest have been tried together.
SUITES = ("bookworm", "trixie")
_COMPONENT = "main"


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """One archive and suite of Debian, component main."""

    uri: str
    suite: str

    @property
    def line(self) -> str:
        return f"deb [signed-by={KEYRING}] {self.uri} {self.suite} {_COMPONENT}"

    @property
    def is_security(self) -> bool:
        return self.suite.endswith("-security")


def host_suite(os_release: Path = Path("/etc/os-release")) -> str:
    """The codename of the host's Debian. Raises `HostUnsuitable` on another system."""
    try:
        text = os_release.read_text()
    except OSError:
        text = ""
    fields: dict[str, str] = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    suite = fields.get("VERSION_CODENAME", "")
    if fields.get("ID") != "debian" or suite not in SUITES:
        name = fields.get("PRETTY_NAME", "an unknown system")
        raise HostUnsuitable(
            f"the base template is built from {' or '.join(SUITES)} on such a host; this one is {name}"
        )
    return suite


def host_sources(suite: str, etc_apt: Path = Path("/etc/apt")) -> list[Source]:
    """The host's Debian archives of `suite`, its updates and security; the public mirror where the host names none."""
    found = set()
    for path in (etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*.list"))):
        found |= set(_one_line_sources(_read(path)))
    for path in sorted((etc_apt / "sources.list.d").glob("*.sources")):
        found |= set(_deb822_sources(_read(path)))
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    # One mirror for each suite is enough: a second one would only be downloaded as well.
    chosen: dict[str, Source] = {}
    for source in sorted(found):
        if source.suite in wanted and _is_debian(source.uri):
            chosen.setdefault(source.suite, source)
    if suite not in chosen:
        return [Source(DEFAULT_MIRROR, suite), Source(SECURITY_MIRROR, f"{suite}-security")]
    return [chosen[name] for name in sorted(chosen)]


def guest_sources(suite: str) -> str:
    """sources.list of the guest: the public mirror, since a mirror of the host's network is out of a guest's reach."""
    sources = (
        Source(DEFAULT_MIRROR, suite),
        Source(DEFAULT_MIRROR, f"{suite}-updates"),
        Source(SECURITY_MIRROR, f"{suite}-security"),
    )
    return "".join(f"deb {source.uri} {source.suite} {_COMPONENT}\n" for source in sources)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _is_debian(uri: str) -> bool:
    return uri.startswith(("http://", "https://")) and uri.rstrip("/").endswith(("/debian", "/debian-security"))


def _one_line_sources(text: str) -> Iterator[Source]:
    """`deb [options] URI SUITE COMPONENT...`, see sources.list(5)."""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line)
        if found and _COMPONENT in found[3].split():
            yield Source(found[1].rstrip("/"), found[2])


def _deb822_sources(text: str) -> Iterator[Source]:
    """Stanzas of fields, separated by empty lines. Continuation lines start with a blank."""
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        fields: dict[str, list[str]] = {}
        name = ""
        for line in lines:
            if line[:1] not in (" ", "\t"):
                name, _, line = line.partition(":")
            fields.setdefault(name.strip().lower(), []).extend(line.split())
        if "deb" not in fields.get("types", []) or fields.get("enabled") == ["no"]:
            continue
        if _COMPONENT in fields.get("components", []):
            for uri in fields.get("uris", []):
                for suite in fields.get("suites", []):
                    yield Source(uri.rstrip("/"), suite)
