"""`aenv auth`: store the server's URL and API key, show which are in use, forget them."""

from __future__ import annotations

import sys

import click

from agentenv.cli.output import note, print_json, print_table, wants_json
from agentenv.cli.session import run, without_httpx_command
from agentenv.cli.settings import AenvCommand, Settings, settings_of

MASKED_TAIL_CHARS = 4


@click.command(cls=AenvCommand)
@click.option("--sandbox-url", metavar="URL", help="Where sandboxes are reached, if not at the server's address.")
@click.option("--no-check", is_flag=True, help="Store without asking the server whether the key is good.")
@click.option("--show", is_flag=True, help="Show the values in use and where each comes from.")
@click.option("--forget", is_flag=True, help="Remove the stored values.")
@click.pass_context
def command(ctx: click.Context, sandbox_url: str | None, no_check: bool, show: bool, forget: bool) -> None:
    """Store the server's URL and API key.

    Both come from --api-url and --api-key or are asked for; the key is read from standard input when it is not a
    terminal. They are kept in ~/.config/aenv/credentials.toml, readable by you alone. Environment variables win over
    the file.
    """
    settings = settings_of(ctx)
    if show and forget:
        raise click.UsageError("--show and --forget exclude each other")
    without_httpx_command()
    if show:
        _show(settings)
    elif forget:
        _forget()
    else:
        _store(settings, sandbox_url, check=not no_check)


def _store(settings: Settings, sandbox_url: str | None, *, check: bool) -> None:
    from agentenv.client import credentials

    path = credentials.default_path()
    url = settings.api_url or _asked_url(credentials.resolve().api_url)
    settings.api_url = credentials.checked_url(url, "API URL")
    settings.api_key = credentials.checked_key(settings.api_key or _asked_key(), "API key")
    if sandbox_url is not None:
        sandbox_url = credentials.checked_url(sandbox_url, "--sandbox-url")
    if check:
        run(
            settings, lambda client: anext(client.sandboxes.iterate(page_items=1), None), waiting_for="checking the key"
        )
    credentials.write_file(path, api_url=settings.api_url, api_key=settings.api_key, sandbox_url=sandbox_url)
    note(f"stored in {path}")


def _asked_url(default: str) -> str:
    if not sys.stdin.isatty():
        return default
    return str(click.prompt("Server URL", default=default, err=True))


def _asked_key() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    return str(click.prompt("API key", hide_input=True, err=True))


def _show(settings: Settings) -> None:
    from agentenv.client import credentials

    found = credentials.resolve(api_url=settings.api_url, api_key=settings.api_key)
    key = "-" if found.api_key is None else masked(found.api_key)
    rows = [
        ("api_url", found.api_url, found.api_url_source),
        ("api_key", key, found.api_key_source),
        ("sandbox_url", found.sandbox_url, found.sandbox_url_source),
    ]
    if wants_json(settings):
        print_json({name: {"value": value, "source": source} for name, value, source in rows})
    else:
        print_table(("NAME", "VALUE", "SOURCE"), rows, fixed=2)


def masked(key: str) -> str:
    """Enough of a key to tell two apart, too little to use."""
    tail = key[-MASKED_TAIL_CHARS:] if len(key) > 4 * MASKED_TAIL_CHARS else ""
    return f"...{tail}"


def _forget() -> None:
    from agentenv.client import credentials

    path = credentials.default_path()
    note(f"removed {path}" if credentials.forget(path) else f"{path} does not exist")
