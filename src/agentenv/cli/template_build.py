"""`aenv template build`."""

from __future__ import annotations

import click

from agentenv.cli.output import print_json, wants_json
from agentenv.cli.session import run
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@click.argument("name")
@click.option("--image", metavar="PATH", help="A raw ext4 image on the node; without it the base packages are used.")
@click.option("--cpu", "cpu_count", type=click.IntRange(min=1), metavar="N", help="Virtual CPUs of its sandboxes.")
@click.option("--memory", "memory_mb", type=click.IntRange(min=1), metavar="MIB", help="Memory of its sandboxes.")
@click.option("--disk", "disk_size_mb", type=click.IntRange(min=1), metavar="MIB", help="Size of a disk made here.")
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    image: str | None,
    cpu_count: int | None,
    memory_mb: int | None,
    disk_size_mb: int | None,
) -> None:
    """Build a template on the node.

    Its root file system becomes a layer, is booted once and snapshotted. A name in use moves to the new template.
    """
    settings = settings_of(ctx)
    built = run(
        settings,
        lambda client: client.templates.build(
            name, image=image, cpu_count=cpu_count, memory_mb=memory_mb, disk_size_mb=disk_size_mb
        ),
        waiting_for=f"building template {name}",
    )
    if wants_json(settings):
        print_json(built.raw)
    else:
        click.echo(built.template_id)
