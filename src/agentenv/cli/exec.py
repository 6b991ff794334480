"""`aenv exec`: the parameters, and how a command line is split at the remote command."""

from __future__ import annotations

import sys

import click

from agentenv.cli.parameters import env_option, sandbox_argument
from agentenv.cli.session import without_httpx_command
from agentenv.cli.settings import AenvCommand, settings_of


class ExecCommand(AenvCommand):
    """Leaves everything from the first word after ID (or after `--`) to the remote command, options and all."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        head, tail = self._split(args)
        return super().parse_args(ctx, [*head, "--", *tail])

    def _split(self, args: list[str]) -> tuple[list[str], list[str]]:
        takes_value = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for name in param.opts
        }
        words = 0
        index = 0
        while index < len(args):
            word = args[index]
            if word == "--":
                return args[:index], args[index + 1 :]
            if word.startswith("-") and word != "-":
                index += 2 if word in takes_value else 1
                continue
            words += 1
            if words == 2:
                return args[:index], args[index:]
            index += 1
        return args, []


@click.command(cls=ExecCommand)
@sandbox_argument
@click.argument("words", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)
@click.option("--user", "-u", metavar="NAME", help="The guest's user (default: the template's).")
@click.option("--cwd", "-w", metavar="DIR", help="Working directory in the sandbox.")
@env_option
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.001),
    help="Kill it after that (stop following it, with --attach).",
)
@click.option(
    "--stdin/--no-stdin",
    "-i/-I",
    "stdin",
    default=None,
    help="Send standard input. Default: yes when it is a pipe or a file.",
)
@click.option("--detach", "-d", is_flag=True, help="Leave it running and print its pid.")
@click.option("--attach", metavar="PID", type=click.IntRange(min=1), help="Follow a running command instead.")
@click.option("--no-shell", is_flag=True, help="Run a single word without a shell, too.")
@click.pass_context
def command(
    ctx: click.Context,
    sandbox_id: str,
    words: tuple[str, ...],
    user: str | None,
    cwd: str | None,
    env: tuple[tuple[str, str], ...],
    timeout_s: float | None,
    stdin: bool | None,
    detach: bool,
    attach: int | None,
    no_shell: bool,
) -> int:
    """Run a command in a sandbox.

    One word is given to the image's login shell (bash, else sh) as it is; several are run as they are, without a
    shell, so images without one work too:

    \b
    aenv exec ID -- 'echo $HOME | tr a-z A-Z'
    aenv exec ID -- /bin/tool a "b c"
    tar c . | aenv exec ID -- tar x -C /srv

    aenv ends with the command's exit code, 128 + n after signal n, 124 after --timeout, 125 when aenv itself failed.
    The first ctrl-C sends SIGTERM, the second SIGKILL, to the command and its children.
    """
    without_httpx_command()
    from agentenv.cli import _exec
    from agentenv.cli.app import report
    from agentenv.errors import AenvError

    if bool(words) == (attach is not None):
        raise click.UsageError("give either a COMMAND or --attach PID")
    request = _exec.Request(
        sandbox_id=sandbox_id,
        command=words[0] if len(words) == 1 and not no_shell else list(words),
        user=user,
        cwd=cwd,
        env=dict(env),
        timeout_s=timeout_s,
        stdin=stdin,
        attach_pid=attach,
    )
    try:
        return _exec.detached(settings_of(ctx), request) if detach else _exec.foreground(settings_of(ctx), request)
    except (AenvError, click.ClickException) as error:
        sys.stdout.flush()
        report(error)
        return _exec.EXIT_AENV_FAILED
