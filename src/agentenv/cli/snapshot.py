"""`aenv snapshot create`, `ls` and `rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.parameters import SANDBOX_ID, quiet_option, sandbox_argument
from agentenv.cli.session import each, run
from agentenv.cli.settings import AenvCommand, settings_of

if TYPE_CHECKING:
    from agentenv.client import AenvClient, SnapshotInfo


@click.group()
def command() -> None:
    """Create, list and delete snapshots.

    A snapshot is the memory and disk of a sandbox at one instant; `aenv create SNAPSHOT` starts from it.
    """


@command.command("create", cls=AenvCommand)
@sandbox_argument
@click.option("--name", metavar="NAME", help="A name for it; a name in use moves to the new snapshot.")
@quiet_option
@click.pass_context
def create(ctx: click.Context, sandbox_id: str, name: str | None, quiet: bool) -> None:
    """Snapshot a sandbox, which goes on running."""
    settings = settings_of(ctx)
    snapshot = run(
        settings,
        lambda client: client.sandboxes.snapshot(sandbox_id, name=name),
        waiting_for=f"taking a snapshot of {sandbox_id}",
    )
    if wants_json(settings) and not quiet:
        print_json(snapshot.raw)
    else:
        click.echo(snapshot.snapshot_id)


@command.command("ls", cls=AenvCommand)
@click.option("--sandbox", "sandbox_id", metavar="ID", type=SANDBOX_ID, help="Only those of this sandbox.")
@quiet_option
@click.pass_context
def ls(ctx: click.Context, sandbox_id: str | None, quiet: bool) -> None:
    """List snapshots."""
    settings = settings_of(ctx)

    async def listed(client: AenvClient) -> list[SnapshotInfo]:
        return [item async for item in client.snapshots.iterate(sandbox_id=sandbox_id)]

    found = run(settings, listed, waiting_for="listing snapshots")
    if quiet:
        for item in found:
            click.echo(item.snapshot_id)
    elif wants_json(settings):
        print_json([item.raw for item in found])
    else:
        print_table(("SNAPSHOT", "NAMES"), [(item.snapshot_id, " ".join(item.names)) for item in found])


@command.command("rm", cls=AenvCommand)
@click.argument("snapshots", metavar="SNAPSHOT...", nargs=-1, required=True)
@click.pass_context
def rm(ctx: click.Context, snapshots: tuple[str, ...]) -> int:
    """Delete snapshots by id or name; sandboxes that run from them go on."""
    return each(settings_of(ctx), snapshots, lambda client, item: client.snapshots.delete(item))
