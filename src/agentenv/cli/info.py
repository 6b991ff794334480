"""`aenv info`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.parameters import sandbox_argument
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, Settings, settings_of
from agentenv.cli.text import mebibytes, until

if TYPE_CHECKING:
    from agentenv.client import AenvClient, SandboxInfo
    from agentenv.client.values import Json

_SAFETY_WORDS = {
    "held": "held (in the stopped VM's memory; not yet safe from a power loss)",
    "durable": "durable (on disk)",
}


@click.command(cls=AenvCommand)
@sandbox_argument
@click.pass_context
def command(ctx: click.Context, sandbox_id: str) -> int:
    """Show one sandbox.

    Of one that ended within a day it shows when and why, and the exit code is 3 as for an unknown
    one. The JSON form of a living one holds its access token, the table does not.
    """
    from agentenv.cli.app import EXIT_NOT_FOUND

    settings = settings_of(ctx)
    ended = run(settings, lambda client: _show(client, settings, sandbox_id))
    if ended is None:
        return 0
    if wants_json(settings):
        print_json({"state": "ended", **ended})
    else:
        names = {"id": "sandboxID", "ended": "endedAt", "reason": "reason", "detail": "detail"}
        rows = [(name, str(ended.get(key) or "-")) for name, key in names.items()]
        print_table(("NAME", "VALUE"), [rows[0], ("state", "ended"), *rows[1:]])
    return EXIT_NOT_FOUND


async def _show(client: AenvClient, settings: Settings, sandbox_id: str) -> Json | None:
    """Print a living sandbox; give the tombstone of one that ended. Raises `NotFound` for one that nobody knows."""
    from agentenv.client.errors import NotFound

    try:
        info = await client.sandboxes.get(sandbox_id)
    except NotFound:
        tombstone = await client.sandboxes.tombstone(sandbox_id)
        if tombstone is None:
            raise
        return tombstone
    safety = await client.sandboxes.pause_safety(sandbox_id)
    if wants_json(settings):
        print_json({**info.raw, "pauseSafety": safety})
    else:
        print_table(("NAME", "VALUE"), _rows(info, safety))
    return None


def _rows(info: SandboxInfo, safety: str | None) -> list[tuple[str, str]]:
    lifecycle = info.raw.get("lifecycle") or {}
    return [
        ("id", info.sandbox_id),
        ("state", info.state),
        *([] if safety is None else [("pause", _SAFETY_WORDS.get(safety, safety))]),
        ("template", f"{info.alias} ({info.template_id})" if info.alias else info.template_id),
        ("cpu", str(info.cpu_count)),
        ("memory", mebibytes(info.memory_mib)),
        ("disk", mebibytes(info.disk_mib)),
        ("started", info.started_at.isoformat(timespec="seconds") if info.started_at else "-"),
        ("expires in", until(info.end_at) if info.state == "running" else "-"),
        ("on expiry", str(lifecycle.get("onTimeout", "-"))),
        ("resumes on traffic", "yes" if info.auto_resume else "no"),
        ("internet", "no" if info.raw.get("allowInternetAccess") is False else "yes"),
        *((f"metadata {key}", value) for key, value in info.metadata.items()),
    ]
