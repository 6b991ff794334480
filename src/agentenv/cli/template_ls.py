"""`aenv template ls`."""

from __future__ import annotations

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of
from agentenv.cli.text import mebibytes, since


@click.command(cls=AenvCommand)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List templates."""
    settings = settings_of(ctx)
    found = run(settings, lambda client: client.templates.list(), waiting_for="listing templates")
    if wants_json(settings):
        print_json([item.raw for item in found])
        return
    columns = ("TEMPLATE", "NAMES", "STATUS", "CPU", "MEMORY", "DISK", "AGE", "STARTS")
    rows = [
        (
            item.template_id,
            " ".join(item.names),
            item.build_status or "-",
            str(item.cpu_count),
            mebibytes(item.memory_mib),
            mebibytes(item.disk_mib),
            since(item.created_at),
            str(item.spawn_count),
        )
        for item in found
    ]
    print_table(columns, rows)
