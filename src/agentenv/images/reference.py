"""Names of images: what a person types, taken apart, and the one canonical form of each.

Owns the grammar alone; looks nothing up. The grammar of registry names is that of the OCI distribution specification
with Docker's two habits: a name without a registry is on docker.io, and one without a namespace is in `library/`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import Final

from agentenv.errors import InvalidRequest, Unsupported

DEFAULT_REGISTRY: Final = "docker.io"
DEFAULT_TAG: Final = "latest"
_DEFAULT_NAMESPACE: Final = "library"
# Docker's own bound on the name without tag and digest; most registries enforce it.
NAME_CHARS_MAX: Final = 255
REFERENCE_CHARS_MAX: Final = 1_024
# Other spellings of docker.io that old tools write.
_DOCKER_HUB: Final = frozenset({"index.docker.io", "registry-1.docker.io", "registry.hub.docker.com"})

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_COMPONENT: Final = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_IMAGE_ID: Final = re.compile(r"[0-9a-f]{64}")


class Transport(enum.StrEnum):
    """Where an image on the node's own disk is: a directory, or one of two kinds of archive."""

    OCI = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """An image in a registry. With a digest the tag is only a note of where it came from."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"

    @property
    def target(self) -> str:
        """What is asked of the registry: the digest where there is one, else the tag."""
        return self.digest or self.tag or DEFAULT_TAG

    def with_digest(self, digest: str) -> RegistryReference:
        """The same name pinned to what it means now."""
        return replace(self, digest=digest)

    def with_tag(self, tag: str) -> RegistryReference:
        """Another tag of the same repository."""
        return replace(self, tag=tag, digest=None)


@dataclass(frozen=True, slots=True)
class LocalReference:
    """An image on the node's disk. `name` picks one where there are several: a tag (OCI) or a repo:tag (docker)."""

    transport: Transport
    path: str
    name: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        name = f":{self.name}" if self.name else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.transport}:{self.path}{name}{digest}"


def parse_reference(text: str) -> RegistryReference | LocalReference:
    """Take apart what a person typed. Raises `InvalidRequest` saying which part is wrong and what would be right."""
    if not text or len(text) > REFERENCE_CHARS_MAX or any(c.isspace() or not c.isprintable() for c in text):
        raise InvalidRequest(f"image reference {text[:80]!r}: it is empty, too long, or holds spaces")
    scheme, colon, rest = text.partition(":")
    if colon and scheme in frozenset(Transport) and rest.startswith(("/", ".")):
        return _parse_local(text, Transport(scheme), rest)
    if "://" in text and scheme != "docker":
        raise InvalidRequest(f"image reference {text!r}: leave {scheme}:// out; a name is [registry/]repository[:tag]")
    return _parse_registry(text, text.removeprefix("docker://"))


def _parse_local(text: str, transport: Transport, rest: str) -> LocalReference:
    before, _, digest = rest.partition("@")
    path, _, name = before.partition(":")
    if not path.startswith("/"):
        raise InvalidRequest(f"image reference {text!r}: the path must be absolute")
    if "@" in rest and not DIGEST.fullmatch(digest):
        raise InvalidRequest(f"image reference {text!r}: {digest!r} is not sha256: and 64 hexadecimal digits")
    if transport is not Transport.DOCKER_ARCHIVE:
        if name and not _TAG.fullmatch(name):
            raise InvalidRequest(f"image reference {text!r}: {name!r} is not a tag")
        return LocalReference(transport, path, name or None, digest or None)
    if digest:
        raise InvalidRequest(f"image reference {text!r}: images in a docker archive have names, no digests")
    # The archive names its images in the short form, so the look-up compares canonical forms.
    return LocalReference(transport, path, str(_parse_registry(text, name)) if name else None)


def _parse_registry(text: str, rest: str) -> RegistryReference:
    name, at, digest = rest.partition("@")
    if at and not DIGEST.fullmatch(digest):
        raise _bad_digest(text, digest)
    name, tag = _split_tag(name)
    if tag is not None and not _TAG.fullmatch(tag):
        raise InvalidRequest(
            f"image reference {text!r}: {tag!r} is not a tag; use up to 128 letters, digits, '_', '.' and '-'"
        )
    registry, repository = _split_registry(name)
    if not _HOST.fullmatch(registry):
        raise InvalidRequest(f"image reference {text!r}: {registry!r} is not a host name with an optional port")
    _check_repository(text, repository)
    if len(registry) + 1 + len(repository) > NAME_CHARS_MAX:
        raise InvalidRequest(f"image reference {text[:80]!r}...: the name has more than {NAME_CHARS_MAX} characters")
    if tag is None and not digest:
        tag = DEFAULT_TAG
    return RegistryReference(registry, repository, tag, digest or None)


def _bad_digest(text: str, digest: str) -> InvalidRequest:
    algorithm = digest.partition(":")[0]
    if algorithm.startswith("sha") and algorithm != "sha256":
        return Unsupported(f"image reference {text!r}: {algorithm} digests are not supported; use a sha256 one")
    return InvalidRequest(f"image reference {text!r}: {digest!r} is not sha256: and 64 hexadecimal digits")


def _split_tag(name: str) -> tuple[str, str | None]:
    """A colon before the last slash belongs to a port."""
    head, colon, tag = name.rpartition(":")
    return (name, None) if not colon or "/" in tag else (head, tag)


def _split_registry(name: str) -> tuple[str, str]:
    """The first component is a registry when it looks like a host: a dot, a port, or `localhost`."""
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        registry, repository = DEFAULT_REGISTRY, name
    else:
        registry, repository = first.lower(), rest
    if registry in _DOCKER_HUB:
        registry = DEFAULT_REGISTRY
    if registry == DEFAULT_REGISTRY and "/" not in repository:
        repository = f"{_DEFAULT_NAMESPACE}/{repository}"
    return registry, repository


def _check_repository(text: str, repository: str) -> None:
    path = repository.removeprefix(f"{_DEFAULT_NAMESPACE}/")
    if _IMAGE_ID.fullmatch(path):
        raise InvalidRequest(f"image reference {text!r}: this is an image id, which no registry can be asked for")
    if not path:
        raise InvalidRequest(f"image reference {text!r}: the repository's name is missing")
    if repository != repository.lower():
        raise InvalidRequest(f"image reference {text!r}: the repository {path!r} must be in lower case")
    for component in repository.split("/"):
        if not _COMPONENT.fullmatch(component):
            raise InvalidRequest(
                f"image reference {text!r}: {component!r} is not part of a repository's name; use a-z and 0-9, "
                "separated by '.', '_', '__' or '-'"
            )
