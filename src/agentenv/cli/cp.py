"""`aenv cp`: the parameters, and what each of them names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import click

from agentenv.cli.session import without_httpx_command
from agentenv.cli.settings import AenvCommand, settings_of

_REMOTE: Final = re.compile(r"([A-Za-z0-9_-]+):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """One side of a copy. `sandbox_id` None is this machine; `path` `-` there is a standard stream."""

    sandbox_id: str | None
    path: str

    @property
    def is_stream(self) -> bool:
        return self.sandbox_id is None and self.path == "-"

    def __str__(self) -> str:
        return self.path if self.sandbox_id is None else f"{self.sandbox_id}:{self.path}"


def parsed(text: str) -> Place:
    """`ID:PATH` is remote, all else local; a local name with a colon is written as `./a:b`. No path is the home."""
    match = _REMOTE.fullmatch(text)
    return Place(None, text) if match is None else Place(match[1], match[2] or ".")


@click.command(cls=AenvCommand)
@click.argument("places", metavar="SOURCE... DESTINATION", nargs=-1, required=True)
@click.option("--recursive", "-r", is_flag=True, help="Copy directories with all that is in them.")
@click.option("--user", "-u", metavar="NAME", help="The guest's user (default: the template's).")
@click.pass_context
def command(ctx: click.Context, places: tuple[str, ...], recursive: bool, user: str | None) -> int:
    """Copy files to or from a sandbox.

    \b
    aenv cp ./a ID:/b           aenv cp ID:/b ./a
    aenv cp -r ./dir ID:/srv    aenv cp -r ID:/srv ./copy
    echo hi | aenv cp - ID:/f   aenv cp ID:/f -

    An existing directory as destination takes the files in. Permissions, and in directories symlinks, are kept.
    A directory travels as a tar archive where the sandbox has tar, else file by file without symlinks. What could
    not be copied is reported file by file, and the exit code is then 1.
    """
    if len(places) < 2:
        raise click.UsageError("give at least one SOURCE and a DESTINATION")
    sources, destination = [parsed(text) for text in places[:-1]], parsed(places[-1])
    ids = {place.sandbox_id for place in sources} - {None}
    if (destination.sandbox_id is None) == (not ids) or (ids and any(s.sandbox_id is None for s in sources)):
        raise click.UsageError("one side must be in a sandbox (ID:PATH) and the other here")
    if len(ids) > 1:
        raise click.UsageError("all sources must be in the same sandbox")
    if len(sources) > 1 and (destination.is_stream or any(source.is_stream for source in sources)):
        raise click.UsageError("- stands for one file only")
    without_httpx_command()
    from agentenv.cli import _cp

    return _cp.copy(settings_of(ctx), sources, destination, recursive=recursive, user=user)
