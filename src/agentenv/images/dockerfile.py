"""Which image a Dockerfile's target stage begins from.

Owns FROM, the ARGs before it, and their substitution; the lines are `_dockerfile_lines`'. Runs no instruction: what a
stage adds to its base is a builder's work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentenv.errors import ImageError, InvalidRequest
from agentenv.images._dockerfile_lines import Instruction, escape_character, instructions
from agentenv.images.manifest import LINUX_AMD64, Platform, parse_platform
from agentenv.images.reference import LocalReference, RegistryReference, parse_reference

_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STAGE_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]*")
_ARGUMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:=(.*))?", re.DOTALL)
# A value that expands to itself would otherwise grow without end.
_EXPANSION_DEPTH_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class DockerfileBase:
    """The base of one stage. No `reference`: it is `scratch`, the empty image. `line` is that of its FROM."""

    reference: RegistryReference | None
    platform: Platform | None
    line: int


@dataclass(frozen=True, slots=True)
class _Stage:
    image: str
    name: str | None
    platform: str | None
    line: int


def dockerfile_base(
    text: str, build_args: Mapping[str, str] | None = None, target: str | None = None
) -> DockerfileBase:
    """The base of the stage `target` (a name or a number; None: the last). Stages that begin from others are followed.

    `build_args` replace the values of ARGs that are declared before the first FROM, as with `docker build`. Raises
    `InvalidRequest` naming the line, or the stages where there is no such target.
    """
    stages = _stages(text, dict(build_args or {}))
    if not stages:
        raise InvalidRequest("Dockerfile: there is no FROM")
    at = _target(stages, target)
    platform = stages[at].platform
    # A stage can only begin from an earlier one, so this ends.
    while (earlier := _stage_called(stages[:at], stages[at].image)) is not None:
        at = earlier
        platform = platform or stages[at].platform
    return _base(stages[at], platform)


def _base(stage: _Stage, platform: str | None) -> DockerfileBase:
    try:
        wanted = parse_platform(platform) if platform else None
        if stage.image == "scratch":
            return DockerfileBase(None, wanted, stage.line)
        reference = parse_reference(stage.image)
    except (InvalidRequest, ImageError) as error:
        raise InvalidRequest(f"Dockerfile line {stage.line}: {error}") from error
    if isinstance(reference, LocalReference):
        # A Dockerfile comes from elsewhere; it must not name files of this node.
        raise InvalidRequest(f"Dockerfile line {stage.line}: FROM takes an image of a registry, not {stage.image!r}")
    return DockerfileBase(reference, wanted, stage.line)


def _target(stages: list[_Stage], target: str | None) -> int:
    if target is None:
        return len(stages) - 1
    if target.isascii() and target.isdigit() and int(target) < len(stages):
        return int(target)
    found = _stage_called(stages, target)
    if found is None:
        names = ", ".join(stage.name for stage in stages if stage.name) or "none has a name"
        raise InvalidRequest(f"Dockerfile: there is no stage {target[:80]!r} ({names})")
    return found


def _stage_called(stages: list[_Stage], name: str) -> int | None:
    """The latest stage of that name; names are compared without regard to case."""
    found = [at for at, stage in enumerate(stages) if stage.name == name.lower()]
    return found[-1] if found else None


def _stages(text: str, build_args: dict[str, str]) -> list[_Stage]:
    escape = escape_character(text)
    values = _platform_arguments() | {k: v for k, v in build_args.items() if k in _platform_arguments()}
    stages: list[_Stage] = []
    for instruction in instructions(text):
        if instruction.name == "FROM":
            stages.append(_from(instruction, values, escape))
        elif instruction.name == "ARG" and not stages:
            # ARGs of a stage are not seen by any FROM.
            _declare(instruction, values, build_args, escape)
        elif not stages:
            raise InvalidRequest(
                f"Dockerfile line {instruction.line}: {instruction.name[:40]} before the first FROM; "
                "only ARG may stand there"
            )
    return stages


def _platform_arguments() -> dict[str, str]:
    """What BuildKit declares by itself; we build for what we run on."""
    values = {}
    for side in ("BUILD", "TARGET"):
        values[f"{side}PLATFORM"] = str(LINUX_AMD64)
        values[f"{side}OS"] = LINUX_AMD64.os
        values[f"{side}ARCH"] = LINUX_AMD64.architecture
        values[f"{side}VARIANT"] = ""
    return values


def _declare(instruction: Instruction, values: dict[str, str], build_args: Mapping[str, str], escape: str) -> None:
    for word in _words(instruction, escape):
        found = _ARGUMENT.fullmatch(word)
        if found is None:
            raise InvalidRequest(f"Dockerfile line {instruction.line}: ARG {word[:80]!r} is not NAME or NAME=value")
        name, default = found[1], found[2]
        if name in build_args:
            values[name] = build_args[name]
        elif default is not None:
            values[name] = _expand(default, values, escape, instruction.line)


def _from(instruction: Instruction, values: Mapping[str, str], escape: str) -> _Stage:
    words, line = _words(instruction, escape), instruction.line
    platform = None
    while words and words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        if flag != "--platform":
            raise InvalidRequest(f"Dockerfile line {line}: FROM does not know {flag[:40]}")
        platform = _expand(value, values, escape, line) or None
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise InvalidRequest(f"Dockerfile line {line}: FROM takes an image, and AS and a name if you like")
    name = words[2].lower() if len(words) == 3 else None
    if name is not None and not _STAGE_NAME.fullmatch(name):
        raise InvalidRequest(f"Dockerfile line {line}: {name[:80]!r} is not a stage's name")
    image = _expand(words[0], values, escape, line)
    if not image:
        raise InvalidRequest(
            f"Dockerfile line {line}: the image {words[0][:80]!r} is empty; give its ARG a value with --build-arg, or "
            "a default before the first FROM"
        )
    return _Stage(image, name, platform, line)


def _words(instruction: Instruction, escape: str) -> list[str]:
    """Split at blanks outside of quotes and of `${...}`; the quotes go, an escaped character stays as it is."""
    words: list[str] = []
    word, quote, depth, started = "", "", 0, False
    text, at = instruction.rest, 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word, started = word + text[at : at + 2], True
            at += 2
            continue
        if quote:
            if char == quote:
                quote = ""
            else:
                # No expansion in single quotes.
                word += escape + char if quote == "'" and char == "$" else char
        elif char in "'\"":
            quote, started = char, True
        elif char.isspace() and depth == 0:
            words, word, started = ([*words, word], "", False) if started else (words, "", False)
        else:
            depth += 1 if text.startswith("${", at) else -1 if char == "}" and depth else 0
            word, started = word + char, True
        at += 1
    if quote:
        raise InvalidRequest(f"Dockerfile line {instruction.line}: a quote {quote} is not closed")
    return [*words, word] if started else words


def _expand(text: str, values: Mapping[str, str], escape: str, line: int, depth: int = 0) -> str:
    """Substitute `$NAME`, `${NAME}`, `${NAME:-word}` and the forms with `-`, `+`, `:+`, `?`, `:?`."""
    if depth > _EXPANSION_DEPTH_MAX:
        raise InvalidRequest(f"Dockerfile line {line}: more than {_EXPANSION_DEPTH_MAX} variables inside each other")
    out, at = "", 0
    while at < len(text):
        if text[at] == escape and at + 1 < len(text):
            out, at = out + text[at + 1], at + 2
        elif text[at] != "$":
            out, at = out + text[at], at + 1
        elif text.startswith("${", at):
            end = _closing(text, at + 2, line)
            out += _braced(text[at + 2 : end], values, escape, line, depth)
            at = end + 1
        elif found := _VARIABLE_NAME.match(text, at + 1):
            out, at = out + values.get(found[0], ""), found.end()
        else:
            raise InvalidRequest(f"Dockerfile line {line}: a $ without a name in {text[:80]!r}")
    return out


def _closing(text: str, at: int, line: int) -> int:
    depth = 1
    for end in range(at, len(text)):
        depth += (text[end] == "{" and text[end - 1] == "$") - (text[end] == "}")
        if depth == 0:
            return end
    raise InvalidRequest(f"Dockerfile line {line}: ${{ without }} in {text[:80]!r}")


def _braced(inner: str, values: Mapping[str, str], escape: str, line: int, depth: int) -> str:
    found = _VARIABLE_NAME.match(inner)
    if found is None:
        raise InvalidRequest(f"Dockerfile line {line}: ${{{inner[:80]}}} has no name")
    value, rest = values.get(found[0]), inner[found.end() :]
    if not rest:
        return value or ""
    # With a colon an empty value counts as none.
    operator, word = (rest[1:2], rest[2:]) if rest[0] == ":" else (rest[0], rest[1:])
    is_set = bool(value) if rest[0] == ":" else value is not None
    if operator not in ("-", "+", "?") or not operator:
        raise InvalidRequest(f"Dockerfile line {line}: ${{{inner[:80]}}} is not a form that FROM and ARG know")
    if operator == "?" and not is_set:
        raise InvalidRequest(f"Dockerfile line {line}: {found[0]}: {word[:200] or 'it is not set'}")
    if operator == "+":
        return _expand(word, values, escape, line, depth + 1) if is_set else ""
    return (value or "") if is_set else _expand(word, values, escape, line, depth + 1)
