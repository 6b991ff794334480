"""`aenv node`."""

from __future__ import annotations

import json

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show what the node says of itself.

    Its driver and accelerator and why they were chosen, sandboxes by state, and capacity.
    """
    settings = settings_of(ctx)
    described = run(settings, lambda client: client.node())
    if wants_json(settings):
        print_json(described)
        return
    rows = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in described.items()]
    print_table(("NAME", "VALUE"), rows)
