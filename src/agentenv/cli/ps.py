"""`aenv ps`."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.parameters import sandbox_argument
from agentenv.cli.session import open_running, run
from agentenv.cli.settings import AenvCommand, settings_of

if TYPE_CHECKING:
    from agentenv.client import AenvClient, ProcessInfo


@click.command(cls=AenvCommand)
@sandbox_argument
@click.pass_context
def command(ctx: click.Context, sandbox_id: str) -> None:
    """List the running commands of a sandbox.

    These are the ones started by exec, shell or an SDK; `aenv exec ID -- ps` shows all processes.
    """
    settings = settings_of(ctx)

    async def listed(client: AenvClient) -> list[ProcessInfo]:
        return await (await open_running(client, sandbox_id)).list_processes()

    found = run(settings, listed)
    if wants_json(settings):
        print_json([dataclasses.asdict(item) for item in found])
        return
    print_table(("PID", "COMMAND"), [(str(item.pid), shlex.join([item.command, *item.args])) for item in found])
