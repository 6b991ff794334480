"""`aenv template rm`."""

from __future__ import annotations

import click

from agentenv.cli.session import each
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@click.argument("templates", metavar="TEMPLATE...", nargs=-1, required=True)
@click.pass_context
def command(ctx: click.Context, templates: tuple[str, ...]) -> int:
    """Delete templates.

    By id or name; sandboxes that run from them go on.
    """
    return each(settings_of(ctx), templates, lambda client, item: client.templates.delete(item))
