"""`aenv config show`: the server's effective configuration and where each value comes from."""

from __future__ import annotations

from pathlib import Path

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.settings import AenvCommand, settings_of


@click.group()
def command() -> None:
    """Show the server's configuration."""


@command.command("show", cls=AenvCommand)
@click.option(
    "--config",
    "path",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The file to read (default: /etc/aenv/config.toml).",
)
@click.pass_context
def show(ctx: click.Context, path: Path | None) -> None:
    """Show every setting of the server on this host, its value and its source."""
    from agentenv import config

    rows = config.effective(config.load(path))
    if wants_json(settings_of(ctx)):
        print_json({item.key: {"value": _jsonable(value), "source": source} for item, value, source in rows})
    else:
        print_table(
            ("KEY", "VALUE", "SOURCE"),
            [(item.key, "-" if value is None else str(_jsonable(value)), source) for item, value, source in rows],
        )


def _jsonable(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
