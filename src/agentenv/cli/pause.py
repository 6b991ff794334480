"""`aenv pause`."""

from __future__ import annotations

import click

from agentenv.cli.parameters import sandbox_arguments
from agentenv.cli.session import each
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@sandbox_arguments
@click.pass_context
def command(ctx: click.Context, sandbox_ids: tuple[str, ...]) -> int:
    """Pause sandboxes with their memory.

    Processes stop where they are and go on after resume. A paused sandbox does not expire.
    """
    return each(settings_of(ctx), sandbox_ids, lambda client, item: client.sandboxes.pause(item))
