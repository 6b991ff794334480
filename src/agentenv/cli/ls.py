"""`aenv ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.parameters import KeyValue, quiet_option
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of
from agentenv.cli.text import mebibytes, since, until

if TYPE_CHECKING:
    from agentenv.client import AenvClient, SandboxInfo


@click.command(cls=AenvCommand)
@click.option(
    "--state", type=click.Choice(["running", "paused", "all"]), default="all", help="Only those in this state."
)
@click.option(
    "--metadata", "-m", metavar="KEY=VALUE", type=KeyValue(), multiple=True, help="Only those with this metadata."
)
@quiet_option
@click.pass_context
def command(ctx: click.Context, state: str, metadata: tuple[tuple[str, str], ...], quiet: bool) -> None:
    """List sandboxes."""
    settings = settings_of(ctx)
    states = ("running", "paused") if state == "all" else (state,)

    async def listed(client: AenvClient) -> list[SandboxInfo]:
        return [item async for item in client.sandboxes.iterate(states=states, metadata=dict(metadata))]

    found = run(settings, listed, waiting_for="listing sandboxes")
    if quiet:
        for item in found:
            click.echo(item.sandbox_id)
    elif wants_json(settings):
        print_json([item.raw for item in found])
    else:
        columns = ("ID", "STATE", "TEMPLATE", "CPU", "MEMORY", "AGE", "EXPIRES IN", "METADATA")
        print_table(columns, [_row(item) for item in found])


def _row(item: SandboxInfo) -> tuple[str, ...]:
    return (
        item.sandbox_id,
        item.state,
        item.alias or item.template_id,
        str(item.cpu_count),
        mebibytes(item.memory_mib),
        since(item.started_at),
        # A paused sandbox's clock stands still.
        until(item.end_at) if item.state == "running" else "-",
        " ".join(f"{key}={value}" for key, value in item.metadata.items()),
    )
