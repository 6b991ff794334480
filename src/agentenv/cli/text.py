"""Text for people: nothing that a server or a guest named can move the cursor, and durations as words. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_STEPS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def printable(value: str) -> str:
    """`value` with control characters, line breaks and lone surrogates written as escapes."""
    if value.isprintable():
        return value
    return "".join(char if char.isprintable() else _escaped(char) for char in value)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def one_line(value: str) -> str:
    """`printable`, with line breaks as spaces."""
    return printable(" ".join(value.split()) if "\n" in value or "\r" in value else value)


def duration(seconds: float) -> str:
    """In the largest unit that is not below one, as `5 min`."""
    whole = max(0, round(seconds))
    for size, unit in _STEPS:
        if whole >= size:
            return f"{whole // size} {unit}"
    return "0 s"


def since(then: datetime | None, now: datetime | None = None) -> str:
    """How long ago, `-` when unknown."""
    return "-" if then is None else duration(((now or datetime.now(UTC)) - _aware(then)).total_seconds())


def until(then: datetime | None, now: datetime | None = None) -> str:
    """How long from now, `-` when unknown."""
    return "-" if then is None else duration((_aware(then) - (now or datetime.now(UTC))).total_seconds())


def _aware(value: datetime) -> datetime:
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def mebibytes(value: int) -> str:
    """A size in MiB as MiB or GiB."""
    return f"{value / 1024:g} GiB" if value >= 1024 and value % 512 == 0 else f"{value} MiB"


def binary_size(count_bytes: int) -> str:
    """Bytes in the largest binary unit that is not below one, with three digits: `1.25 GiB`."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{count_bytes} B" if unit == "B" else f"{value:.3g} {unit}"
