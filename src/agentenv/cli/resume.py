"""`aenv resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from agentenv.cli.output import note
from agentenv.cli.parameters import sandbox_arguments, timeout_option
from agentenv.cli.session import each
from agentenv.cli.settings import AenvCommand, settings_of

if TYPE_CHECKING:
    from agentenv.client import AenvClient


@click.command(cls=AenvCommand)
@sandbox_arguments
@timeout_option("Seconds until they expire, at least (the server's default: 300).")
@click.pass_context
def command(ctx: click.Context, sandbox_ids: tuple[str, ...], timeout_s: int | None) -> int:
    """Resume paused sandboxes.

    One that runs already is left running; its expiry is only ever extended.
    """

    async def connect(client: AenvClient, sandbox_id: str) -> None:
        _, was_resumed = await client.sandboxes.connect(sandbox_id, timeout_s=timeout_s)
        if not was_resumed:
            note(f"{sandbox_id} was running already")

    return each(settings_of(ctx), sandbox_ids, connect)
