"""A Dockerfile's logical lines: continuations joined, comments and here-documents taken out, each with its number.

Owns the line grammar and knows no instruction but for which of them may carry a here-document. The rules are those of
the Dockerfile reference: the escape character of the first directives, comments inside a continuation, `<<` bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agentenv.errors import InvalidRequest

DOCKERFILE_BYTES_MAX: Final = 1 << 20
_DIRECTIVE: Final = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*$")
_HEREDOC: Final = re.compile(
    r"(?<![<\d])\d*<<(?P<dash>-?)\s*(?P<quote>['\"]?)(?P<name>[A-Za-z_][A-Za-z0-9_.]*)(?P=quote)"
)
# Elsewhere `<<` is text.
_MAY_HAVE_HEREDOC: Final = frozenset({"RUN", "COPY", "ADD"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name in capitals, what follows it, and the number of its first line (from 1)."""

    name: str
    rest: str
    line: int


def escape_character(text: str) -> str:
    """The escape character that the directives at the top choose; a backslash where they choose none."""
    for line in text.splitlines():
        found = _DIRECTIVE.match(line.strip())
        if found is None:
            # Directives end at the first line that is none, even an empty one.
            return "\\"
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise InvalidRequest(f"Dockerfile: the escape directive must be \\ or `, not {found[2][:20]!r}")
            return found[2]
    return "\\"


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions in order. Raises `InvalidRequest` with the line for a here-document that does not end."""
    if len(text.encode()) > DOCKERFILE_BYTES_MAX:
        raise InvalidRequest(f"Dockerfile: more than {DOCKERFILE_BYTES_MAX} bytes")
    escape = escape_character(text)
    lines = text.removeprefix("\ufeff").splitlines()
    at = 0
    while at < len(lines):
        stripped = lines[at].strip()
        if not stripped or stripped.startswith("#"):
            at += 1
            continue
        first = at + 1
        joined, at = _join(lines, at, escape)
        name, _, rest = joined.strip().partition(" ")
        # A tab separates as well.
        name, _, more = name.partition("\t")
        instruction = Instruction(name.upper(), f"{more} {rest}".strip(), first)
        if instruction.name in _MAY_HAVE_HEREDOC:
            at = _skip_heredocs(instruction, lines, at)
        yield instruction


def _join(lines: list[str], at: int, escape: str) -> tuple[str, int]:
    """The logical line that begins at `at`, and where the next one begins."""
    parts: list[str] = []
    while at < len(lines):
        line = lines[at]
        at += 1
        if parts and (not line.strip() or line.lstrip().startswith("#")):
            # Comments and (for old files) empty lines do not end a continuation.
            continue
        bare = line.rstrip()
        if not bare.endswith(escape):
            parts.append(line)
            break
        parts.append(bare[: -len(escape)])
    return "".join(parts), at


def _skip_heredocs(instruction: Instruction, lines: list[str], at: int) -> int:
    """Where the bodies of the instruction's here-documents end; they follow each other."""
    for found in _HEREDOC.finditer(_unquoted(instruction.rest)):
        while True:
            if at >= len(lines):
                raise InvalidRequest(
                    f"Dockerfile line {instruction.line}: the here-document {found['name']!r} has no end"
                )
            line = lines[at].lstrip("\t") if found["dash"] else lines[at]
            at += 1
            if line == found["name"]:
                break
    return at


def _unquoted(text: str) -> str:
    """The text without quoted words, in which `<<` means nothing; but `<<"EOF"` keeps its quotes."""
    return re.sub(r"(?<!<<)(?<!<<-)(\"(?:\\.|[^\"\\])*\"|'[^']*')", "''", text)
