"""`aenv fork`."""

from __future__ import annotations

import click

from agentenv.cli.app import report
from agentenv.cli.output import print_json, wants_json
from agentenv.cli.parameters import quiet_option, sandbox_argument, timeout_option
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@sandbox_argument
@click.option("--count", "-n", type=click.IntRange(min=1), default=1, show_default=True, help="How many children.")
@timeout_option("Seconds until the children expire (the server's default: 15).")
@quiet_option
@click.pass_context
def command(ctx: click.Context, sandbox_id: str, count: int, timeout_s: int | None, quiet: bool) -> int:
    """Branch a running sandbox.

    Each child has the source's memory, disk, resources and settings; the source goes on running. Children that could
    not be started are reported, and the exit code is then 1.
    """
    settings = settings_of(ctx)
    children = run(
        settings,
        lambda client: client.sandboxes.fork(sandbox_id, count=count, timeout_s=timeout_s),
        waiting_for=f"forking {sandbox_id}",
    )
    born = [child for child in children if not isinstance(child, Exception)]
    if wants_json(settings) and not quiet:
        print_json(
            [
                {"error": {"code": child.code, "message": str(child)}}
                if isinstance(child, Exception)
                else {"sandbox": child.raw}
                for child in children
            ]
        )
    else:
        for sandbox in born:
            click.echo(sandbox.sandbox_id)
    for child in children:
        if isinstance(child, Exception):
            report(child)
    return 0 if len(born) == count else 1
