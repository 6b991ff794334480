"""`aenv create`."""

from __future__ import annotations

import click

from agentenv.cli.output import note, print_json, wants_json
from agentenv.cli.parameters import KeyValue, disk_option, env_option, quiet_option, timeout_option
from agentenv.cli.session import run, run_with_steps
from agentenv.cli.settings import AenvCommand, Settings, settings_of


@click.command(cls=AenvCommand)
@click.argument("template", required=False)
@timeout_option("Seconds until it expires (the server's default: 300).")
@click.option("--no-auto-pause", is_flag=True, help="Delete it when it expires, instead of pausing it.")
@click.option("--auto-resume", is_flag=True, help="Let traffic resume it while it is paused.")
@click.option(
    "--metadata", "-m", metavar="KEY=VALUE", type=KeyValue(), multiple=True, help="Metadata. May be repeated."
)
@env_option
@click.option("--no-internet", is_flag=True, help="Deny all connections to the internet.")
@click.option("--image", metavar="REF", help="Start from an OCI image instead of a template.")
@disk_option("--disk-mib", "Size of the disk, with --image (the server's default: 8192).")
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    template: str | None,
    timeout_s: int | None,
    no_auto_pause: bool,
    auto_resume: bool,
    metadata: tuple[tuple[str, str], ...],
    env: tuple[tuple[str, str], ...],
    no_internet: bool,
    image: str | None,
    disk_size_mb: int | None,
    quiet: bool,
) -> None:
    """Start a sandbox.

    TEMPLATE is the id or name of a template or snapshot, by default base. When it expires it is paused, unless
    --no-auto-pause is given.

    With --image the server pulls the image, converts it and boots it once, which takes a while the first time; later
    it starts as fast as any template. REF is an image of a registry or on the server's own disk:

    \b
    aenv create --image python:3.12
    aenv create --image oci:/dir:tag
    aenv create --image oci-archive:/file.tar     (also docker-archive:)

    Paths are the server's, which reads them with its own rights: whoever has an API key can use any image there.
    """
    if image is not None and template is not None:
        raise click.UsageError("give either TEMPLATE or --image")
    if image is None and disk_size_mb is not None:
        raise click.UsageError("--disk-mib can only be given with --image")
    settings = settings_of(ctx)
    origin = (template or "base") if image is None else _template_of(settings, image, disk_size_mb)
    sandbox = run(
        settings,
        lambda client: client.sandboxes.create(
            origin,
            timeout_s=timeout_s,
            auto_pause=False if no_auto_pause else None,
            auto_resume=auto_resume,
            metadata=dict(metadata),
            env=dict(env),
            allow_internet=not no_internet,
        ),
        waiting_for=f"starting a sandbox from {image or origin}",
    )
    if wants_json(settings) and not quiet:
        print_json(sandbox.raw)
        return
    click.echo(sandbox.sandbox_id)
    if not quiet:
        note(f"running; open a shell with: aenv shell {sandbox.sandbox_id}")


def _template_of(settings: Settings, image: str, disk_size_mb: int | None) -> str:
    """The id of the image's template, which is built if it is not there yet."""
    built = run_with_steps(
        settings, lambda client, show: client.templates.build(image=image, disk_size_mb=disk_size_mb, progress=show)
    )
    return built.template_id
