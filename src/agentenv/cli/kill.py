"""`aenv kill`."""

from __future__ import annotations

import click

from agentenv.cli.parameters import sandbox_arguments
from agentenv.cli.session import each
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@sandbox_arguments
@click.pass_context
def command(ctx: click.Context, sandbox_ids: tuple[str, ...]) -> int:
    """Delete sandboxes.

    Running and paused ones alike, with all that they hold; snapshots taken of them stay.
    """
    return each(settings_of(ctx), sandbox_ids, lambda client, item: client.sandboxes.kill(item))
