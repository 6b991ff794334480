"""The global options, which every command takes before or after its name, and the command class that adds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import click


@dataclass(slots=True)
class Settings:
    """What the global options said; `ctx.obj` of every command."""

    json: bool = False
    api_url: str | None = None
    api_key: str | None = None
    # Of the process: an error may come up before any context exists.
    debug_requested: ClassVar[bool] = False


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    settings = ctx.ensure_object(Settings)
    if param.name == "debug":
        Settings.debug_requested = Settings.debug_requested or bool(value)
    elif value and param.name:
        setattr(settings, param.name, value)


def global_options(*, hidden: bool) -> list[click.Parameter]:
    """Fresh parameters. `hidden` keeps all but --json out of the help of each subcommand."""
    return [
        click.Option(
            ["--json"], is_flag=True, expose_value=False, callback=_remember, help="Print JSON, also on a terminal."
        ),
        click.Option(
            ["--api-url"], metavar="URL", expose_value=False, callback=_remember, hidden=hidden, help="Server address."
        ),
        click.Option(
            ["--api-key"], metavar="KEY", expose_value=False, callback=_remember, hidden=hidden, help="API key."
        ),
        click.Option(
            ["--debug"],
            is_flag=True,
            expose_value=False,
            callback=_remember,
            hidden=hidden,
            help="Show a traceback for errors.",
        ),
    ]


class AenvCommand(click.Command):
    """A command that also takes the global options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params = [*self.params, *global_options(hidden=True)]


def settings_of(ctx: click.Context) -> Settings:
    """The settings of the running command."""
    return ctx.ensure_object(Settings)
