"""`aenv shell`: the parameters."""

from __future__ import annotations

import os

import click

from agentenv.cli.parameters import env_option, sandbox_argument
from agentenv.cli.session import without_httpx_command
from agentenv.cli.settings import AenvCommand, settings_of


@click.command(cls=AenvCommand)
@sandbox_argument
@click.option("--user", "-u", metavar="NAME", help="The guest's user (default: the template's).")
@click.option("--cwd", "-w", metavar="DIR", help="Working directory in the sandbox.")
@env_option
@click.pass_context
def command(
    ctx: click.Context, sandbox_id: str, user: str | None, cwd: str | None, env: tuple[tuple[str, str], ...]
) -> int:
    """Open an interactive shell in a sandbox.

    A login shell (bash, else sh) on a terminal of its own; ctrl-C and ctrl-D go to it, its exit code becomes aenv's.
    When this terminal goes away the shell is killed.
    """
    without_httpx_command()
    from agentenv.cli import _shell
    from agentenv.cli.app import report
    from agentenv.errors import AenvError

    if not (os.isatty(0) and os.isatty(1)):
        raise click.UsageError("shell needs a terminal on standard input and output; use aenv exec")
    try:
        return _shell.interactive(settings_of(ctx), sandbox_id, user=user, cwd=cwd, env=dict(env))
    except (AenvError, click.ClickException) as error:
        report(error)
        return _shell.EXIT_AENV_FAILED
