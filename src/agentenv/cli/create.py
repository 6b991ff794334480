"""`aenv create`."""

from __future__ import annotations

import click

from agentenv.cli.output import note, print_json, wants_json
from agentenv.cli.parameters import KeyValue, env_option, quiet_option, timeout_option
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@click.argument("template", default="base")
@timeout_option("Seconds until it expires (the server's default: 300).")
@click.option("--no-auto-pause", is_flag=True, help="Delete it when it expires, instead of pausing it.")
@click.option("--auto-resume", is_flag=True, help="Let traffic resume it while it is paused.")
@click.option(
    "--metadata", "-m", metavar="KEY=VALUE", type=KeyValue(), multiple=True, help="Metadata. May be repeated."
)
@env_option
@click.option("--no-internet", is_flag=True, help="Deny all connections to the internet.")
@click.option("--image", metavar="REF", help="Not in this version: start from an OCI image.")
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    template: str,
    timeout_s: int | None,
    no_auto_pause: bool,
    auto_resume: bool,
    metadata: tuple[tuple[str, str], ...],
    env: tuple[tuple[str, str], ...],
    no_internet: bool,
    image: str | None,
    quiet: bool,
) -> None:
    """Start a sandbox.

    TEMPLATE is the id or name of a template or snapshot, by default base. When it expires it is paused, unless
    --no-auto-pause is given.
    """
    if image is not None:
        raise click.UsageError("--image is not supported in this version; use a template (aenv template ls)")
    settings = settings_of(ctx)
    sandbox = run(
        settings,
        lambda client: client.sandboxes.create(
            template,
            timeout_s=timeout_s,
            auto_pause=False if no_auto_pause else None,
            auto_resume=auto_resume,
            metadata=dict(metadata),
            env=dict(env),
            allow_internet=not no_internet,
        ),
        waiting_for=f"starting a sandbox from {template}",
    )
    if wants_json(settings) and not quiet:
        print_json(sandbox.raw)
        return
    click.echo(sandbox.sandbox_id)
    if not quiet:
        note(f"running; open a shell with: aenv shell {sandbox.sandbox_id}")
