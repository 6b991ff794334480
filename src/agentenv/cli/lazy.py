"""Groups whose subcommands are imported only when invoked, so that `aenv --help` imports click alone.

The one-line help of each subcommand therefore stands in the group's table; a test compares it with the command's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import click

# Top-level modules that come with the extra `server`; missing ones mean that it is not installed.
SERVER_MODULES: Final = frozenset({"httptools", "msgspec", "pyroute2", "starlette", "structlog", "uvicorn", "uvloop"})


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a subcommand is (`module` has it as `command`) and its help line. `server` marks the server's own."""

    module: str
    help: str
    server: bool = False


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports them when asked for one."""

    def __init__(self, slots: Mapping[str, Slot], **settings: Any) -> None:
        super().__init__(invoke_without_command=True, no_args_is_help=False, **settings)
        self.slots = dict(slots)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.slots)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        slot = self.slots.get(cmd_name)
        return None if slot is None else load(slot)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Like click's, from the table instead of the imported commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, slot.help) for name, slot in self.slots.items()])

    def invoke(self, ctx: click.Context) -> Any:
        result = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
            return 0
        return result


def load(slot: Slot) -> click.Command:
    """The command in a slot. Raises `click.ClickException` when the server that it needs is not installed."""
    try:
        command = importlib.import_module(slot.module).command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if slot.server and (missing in SERVER_MODULES or error.name == slot.module):
            raise click.ClickException(
                f"this command needs the server, which is not installed here ({error.name} is missing); "
                "install agentenv[server]"
            ) from error
        raise
    if not isinstance(command, click.Command):
        raise TypeError(f"{slot.module}.command is not a click command")
    return command
