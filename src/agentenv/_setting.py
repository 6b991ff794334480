"""One setting: how it is declared, read from text or TOML, and checked.

Owns the kinds of values (text, whole number, number, path, list of words) and their limits. Which settings there
are is `config`'s business.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv.errors import ConfigError

ENV_PREFIX: Final = "AENV_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table. `minimum` and `maximum` are inclusive; `choices` are the only accepted words."""

    key: str
    kind: str
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]

    @property
    def env_name(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.key.upper().replace(".", "_")


def declare(
    default: Any,
    help: str,  # noqa: A002 - the word that users know from argparse and click
    *,
    kind: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that carries its own documentation and limits; typed Any so that fields keep their type."""
    metadata = {"kind": kind, "help": help, "minimum": minimum, "maximum": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def text_setting(default: str, help: str, choices: tuple[str, ...] = ()) -> Any:  # noqa: A002
    """A string, or one of `choices`."""
    return declare(default, help, kind="text", choices=choices)


def whole_setting(default: int, minimum: int, maximum: int, help: str) -> Any:  # noqa: A002
    """A whole number from `minimum` to `maximum`."""
    return declare(default, help, kind="int", minimum=minimum, maximum=maximum)


def seconds_setting(default: float, minimum: float, maximum: float, help: str) -> Any:  # noqa: A002
    """A duration in seconds, fractions allowed."""
    return declare(default, help, kind="float", minimum=minimum, maximum=maximum)


def path_setting(default: str | None, help: str) -> Any:  # noqa: A002
    """An absolute path; None means that it is optional or derived."""
    return declare(None if default is None else Path(default), help, kind="path")


def from_text(item: Setting, text: str, source: str) -> Any:
    """The value of an environment variable. Raises `ConfigError` when a number is none."""
    try:
        match item.kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "path":
                return Path(text) if text else None
            case "list":
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case _:
                return text
    except ValueError as error:
        raise ConfigError(f"{item.key} ({source}): {text!r} is not a number") from error


def from_toml(item: Setting, value: Any, source: str) -> Any:
    """The value of a TOML key. Raises `ConfigError` for a wrong type."""
    # bool is an int to Python, but `true` is no count.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if item.kind == "int" and number and isinstance(value, int):
        return value
    if item.kind == "float" and number:
        return float(value)
    if item.kind == "text" and isinstance(value, str):
        return value
    if item.kind == "path" and isinstance(value, str):
        return Path(value) if value else None
    if item.kind == "list" and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    expected = {"int": "a whole number", "float": "a number", "list": "a list of strings"}.get(item.kind, "a string")
    raise ConfigError(f"{item.key} ({source}): expected {expected}, got {value!r}")


def check(item: Setting, value: Any, source: str) -> None:
    """Raises `ConfigError`, naming key and source, when `value` is outside the limits of its setting."""
    where = f"{item.key} ({source})"
    if item.kind in ("int", "float") and item.minimum is not None and item.maximum is not None:
        # Written so that NaN, which compares false with everything, is refused.
        if not item.minimum <= value <= item.maximum:
            raise ConfigError(f"{where}: {value} is outside {item.minimum:g} to {item.maximum:g}")
    elif item.choices and value not in item.choices:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(item.choices)}")
    elif item.kind == "path":
        if value is None and item.default is not None:
            raise ConfigError(f"{where}: must not be empty")
        if value is not None and (not value.is_absolute() or "\0" in str(value)):
            raise ConfigError(f"{where}: {str(value)!r} is not an absolute path")
