"""`aenv timeout`."""

from __future__ import annotations

import click

from agentenv.cli.parameters import TIMEOUT_S, sandbox_argument
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@sandbox_argument
@click.argument("seconds", type=TIMEOUT_S)
@click.pass_context
def command(ctx: click.Context, sandbox_id: str, seconds: int) -> None:
    """Set when a sandbox expires.

    It then expires SECONDS from now, later or earlier than before; 0 lets it expire at once.
    """
    run(settings_of(ctx), lambda client: client.sandboxes.set_timeout(sandbox_id, seconds))
