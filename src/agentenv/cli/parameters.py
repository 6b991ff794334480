"""Parameter types and decorators that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from agentenv.cli.settings import settings_of

F = TypeVar("F", bound=Callable[..., Any])
COMPLETION_TIMEOUT_S: Final = 2.0
TIMEOUT_S_MAX: Final = 30 * 86_400


if TYPE_CHECKING:
    # Generic since click 8.2 only, so the subscript must not be evaluated.
    IdType = click.ParamType[str]
    KeyValueType = click.ParamType[tuple[str, str]]
else:
    IdType = KeyValueType = click.ParamType


class SandboxId(IdType):
    """A sandbox id; completes to those that the server lists."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not text or not all(char.isalnum() or char in "-_" for char in text):
            self.fail(f"{text!r} is not a sandbox id", param, ctx)
        return text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The ids that begin so. Never raises: a shell that completes has no place for an error."""
        import asyncio

        from agentenv.cli.session import new_client

        async def ids() -> list[CompletionItem]:
            # Loading httpx, inside of new_client, is not the server's time.
            async with new_client(settings_of(ctx)) as client, asyncio.timeout(COMPLETION_TIMEOUT_S):
                return [
                    CompletionItem(item.sandbox_id, help=f"{item.alias or item.template_id} {item.state}")
                    async for item in client.sandboxes.iterate()
                    if item.sandbox_id.startswith(incomplete)
                ]

        try:
            return asyncio.run(ids())
        except Exception:
            return []


class KeyValue(KeyValueType):
    """`KEY=VALUE`. With `from_environment`, `KEY` alone takes the value of this process's environment."""

    name = "key=value"

    def __init__(self, *, from_environment: bool = False) -> None:
        self._from_environment = from_environment

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, content = str(value).partition("=")
        if not key:
            self.fail(f"{value!r} lacks a key", param, ctx)
        if equals:
            return key, content
        if not self._from_environment:
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        if key not in os.environ:
            self.fail(f"{key!r} has no value here and is not in the environment", param, ctx)
        return key, os.environ[key]


SANDBOX_ID: Final = SandboxId()
TIMEOUT_S: Final = click.IntRange(0, TIMEOUT_S_MAX)


def sandbox_argument(function: F) -> F:
    """The argument ID."""
    return click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)(function)


def sandbox_arguments(function: F) -> F:
    """One or more arguments ID."""
    return click.argument("sandbox_ids", metavar="ID...", type=SANDBOX_ID, nargs=-1, required=True)(function)


def env_option(function: F) -> F:
    """-e KEY=VALUE, many times."""
    return click.option(
        "--env",
        "-e",
        metavar="KEY=VALUE",
        type=KeyValue(from_environment=True),
        multiple=True,
        help="Environment variable; KEY alone takes its value from here. May be repeated.",
    )(function)


def timeout_option(help_text: str) -> Callable[[F], F]:
    """--timeout SECONDS until a sandbox expires."""
    return click.option("--timeout", "timeout_s", metavar="SECONDS", type=TIMEOUT_S, default=None, help=help_text)


def disk_option(name: str, help_text: str) -> Callable[[F], F]:
    """The size of a disk, as `disk_size_mb`."""
    return click.option(name, "disk_size_mb", type=click.IntRange(min=1), metavar="MIB", default=None, help=help_text)


def quiet_option(function: F) -> F:
    """-q, ids only."""
    return click.option("--quiet", "-q", is_flag=True, help="Print only ids, one per line.")(function)
