"""`aenv image pull`, `ls`, `rm` and `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.parameters import disk_option, quiet_option
from agentenv.cli.session import run, run_with_steps, without_httpx_command
from agentenv.cli.settings import AenvCommand, settings_of
from agentenv.cli.text import binary_size, mebibytes, since

if TYPE_CHECKING:
    from agentenv.client import AenvClient, ImageInfo

SHORT_DIGITS: Final = 12
PREFIX_DIGITS_MIN: Final = 6


@click.group()
def command() -> None:
    """Pull, list and forget OCI images; export snapshots.

    The server converts every layer of an image once and shares it between all images and sandboxes that have it.
    """


@command.command("pull", cls=AenvCommand)
@click.argument("reference", metavar="REF")
@disk_option("--disk-mib", "Size of the disks that it is for (the server's default: 8192).")
@click.pass_context
def pull(ctx: click.Context, reference: str, disk_size_mb: int | None) -> None:
    """Pull and convert an image, so that `aenv create --image` finds it.

    REF is an image of a registry or on the server's own disk:

    \b
    aenv image pull python:3.12
    aenv image pull oci:/dir:tag
    aenv image pull oci-archive:/file.tar         (also docker-archive:)

    Paths are the server's, which reads them with its own rights: whoever has an API key can use any image there.
    """
    settings = settings_of(ctx)
    image = run_with_steps(
        settings, lambda client, show: client.images.pull(reference, disk_size_mb=disk_size_mb, progress=show)
    )
    if wants_json(settings):
        print_json(image.raw)
    else:
        click.echo(image.digest)


@command.command("ls", cls=AenvCommand)
@quiet_option
@click.pass_context
def ls(ctx: click.Context, quiet: bool) -> None:
    """List the images that the server has converted."""
    settings = settings_of(ctx)
    found = run(settings, lambda client: client.images.list(), waiting_for="listing images")
    if quiet:
        for item in found:
            click.echo(item.digest)
    elif wants_json(settings):
        print_json([item.raw for item in found])
    else:
        columns = ("DIGEST", "REFERENCES", "LAYERS", "SIZE", "DISK", "AGE")
        print_table(columns, [_row(item) for item in found])


def _row(item: ImageInfo) -> tuple[str, ...]:
    return (
        item.digest.removeprefix("sha256:")[:SHORT_DIGITS],
        " ".join(item.references) or "-",
        str(len(item.layers)),
        binary_size(item.size_bytes),
        mebibytes(item.disk_mib),
        since(item.created_at),
    )


@command.command("rm", cls=AenvCommand)
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@click.pass_context
def rm(ctx: click.Context, images: tuple[str, ...]) -> int:
    """Forget converted images.

    By reference, digest or the beginning of one. Templates made of them stay; layers that nothing needs any more go
    with the next `aenv storage gc`.
    """
    from agentenv.cli.app import report
    from agentenv.errors import AenvError

    async def remove(client: AenvClient) -> int:
        known = await client.images.list()
        code = 0
        for name in images:
            try:
                await client.images.delete(_digest_of(name, known))
            except (AenvError, click.ClickException) as error:
                code = report(error)
        return code

    return run(settings_of(ctx), remove, waiting_for="forgetting images")


def _digest_of(name: str, known: list[ImageInfo]) -> str:
    """The one digest that goes by this name. Raises `NotFound`, `ClickException` for a beginning of several."""
    from agentenv.client.errors import NotFound

    digits = name.removeprefix("sha256:")
    found = {item.digest for item in known if name in item.references}
    if not found and len(digits) >= PREFIX_DIGITS_MIN:
        found = {item.digest for item in known if item.digest.startswith(f"sha256:{digits}")}
    if not found:
        raise NotFound(f"image {name} was not converted on this server")
    if len(found) > 1:
        raise click.ClickException(f"{name} means {len(found)} images; give a digest (aenv image ls -q)")
    return found.pop()


@command.command("export", cls=AenvCommand)
@click.argument("snapshot")
@click.option("--output", "-o", metavar="FILE", required=True, help="The archive to write; - is standard output.")
@click.option(
    "--compression", type=click.Choice(["none", "gzip", "zstd"]), default=None, help="Of its layers (default: gzip)."
)
@click.option("--reference", metavar="NAME", help="The image's name in the archive (default: the snapshot's).")
@click.pass_context
def export(ctx: click.Context, snapshot: str, output: str, compression: str | None, reference: str | None) -> None:
    """Write the disk of a snapshot as an OCI archive.

    SNAPSHOT is the id or name of a snapshot or template. The archive is one tar file, which podman, skopeo and
    `aenv create --image oci-archive:...` read; the configuration of the image that the template was made of is kept,
    memory and processes are not in it. FILE appears when it is whole.
    """
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("-o -: the archive is not for a terminal; redirect standard output")
    if output != "-" and not Path(output).parent.is_dir():
        raise click.UsageError(f"-o {output}: there is no directory {Path(output).parent}")
    without_httpx_command()
    from agentenv.cli import _export

    settings = settings_of(ctx)
    size_bytes = run(
        settings, lambda client: _export.export(client, snapshot, output, compression=compression, reference=reference)
    )
    if output == "-":
        return
    if wants_json(settings):
        print_json({"file": output, "sizeBytes": size_bytes})
    else:
        click.echo(f"{output}: {binary_size(size_bytes)}")
