"""`aenv version`."""

from __future__ import annotations

import click

from agentenv import __version__
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Print the version."""
    if settings_of(ctx).json:
        from agentenv.cli.output import print_json

        print_json({"version": __version__})
    else:
        click.echo(f"aenv {__version__}")
