"""`aenv info`."""

from __future__ import annotations

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.parameters import sandbox_argument
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of
from agentenv.cli.text import mebibytes, until


@click.command(cls=AenvCommand)
@sandbox_argument
@click.pass_context
def command(ctx: click.Context, sandbox_id: str) -> None:
    """Show one sandbox.

    The JSON form holds its access token, the table does not.
    """
    settings = settings_of(ctx)
    info = run(settings, lambda client: client.sandboxes.get(sandbox_id))
    if wants_json(settings):
        print_json(info.raw)
        return
    lifecycle = info.raw.get("lifecycle") or {}
    rows = [
        ("id", info.sandbox_id),
        ("state", info.state),
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
    print_table(("NAME", "VALUE"), rows)
