"""`aenv template build`."""

from __future__ import annotations

from typing import IO, Final

import click

from agentenv.cli.output import print_json, wants_json
from agentenv.cli.parameters import KeyValue, disk_option
from agentenv.cli.session import run_with_steps
from agentenv.cli.settings import AenvCommand, settings_of

# The server takes 1 MiB for the whole request.
DOCKERFILE_BYTES_MAX: Final = 512 * 1024


@click.command(cls=AenvCommand)
@click.argument("name")
@click.option("--image", metavar="REF", help="An OCI image, or the absolute path of a raw ext4 image on the server.")
@click.option("--dockerfile", metavar="FILE", type=click.File("rb"), help="Take the image of its FROM; - is stdin.")
@click.option(
    "--build-arg", "build_args", metavar="KEY=VALUE", type=KeyValue(from_environment=True), multiple=True,
    help="Value of an ARG of the Dockerfile; KEY alone takes its value from here. May be repeated.",
)  # fmt: skip
@click.option("--cpu", "cpu_count", type=click.IntRange(min=1), metavar="N", help="Virtual CPUs of its sandboxes.")
@click.option("--memory", "memory_mb", type=click.IntRange(min=1), metavar="MIB", help="Memory of its sandboxes.")
@disk_option("--disk", "Size of a disk made here.")
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    image: str | None,
    dockerfile: IO[bytes] | None,
    build_args: tuple[tuple[str, str], ...],
    cpu_count: int | None,
    memory_mb: int | None,
    disk_size_mb: int | None,
) -> None:
    """Build a template on the node.

    Of an OCI image, of a Dockerfile's base, or of the base packages where neither is given. Its root file system
    becomes layers, is booted once and snapshotted. A name in use moves to the new template.
    """
    if image is not None and dockerfile is not None:
        raise click.UsageError("give either --image or --dockerfile")
    if build_args and dockerfile is None:
        raise click.UsageError("--build-arg can only be given with --dockerfile")
    settings = settings_of(ctx)
    text = None if dockerfile is None else _text_of(dockerfile)
    built = run_with_steps(
        settings,
        lambda client, show: client.templates.build(
            name,
            image=image,
            dockerfile=text,
            build_args=dict(build_args),
            cpu_count=cpu_count,
            memory_mb=memory_mb,
            disk_size_mb=disk_size_mb,
            progress=show,
        ),
    )
    if wants_json(settings):
        print_json(built.raw)
    else:
        click.echo(built.template_id)


def _text_of(file: IO[bytes]) -> str:
    data = file.read(DOCKERFILE_BYTES_MAX + 1)
    if len(data) > DOCKERFILE_BYTES_MAX:
        raise click.UsageError(f"--dockerfile: {file.name} is larger than {DOCKERFILE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--dockerfile: {file.name} is not UTF-8") from error
