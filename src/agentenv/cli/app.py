"""The root of `aenv`: the table of commands, and the one place that turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from agentenv.cli.lazy import LazyGroup, Slot
from agentenv.cli.settings import Settings, global_options

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_UNAUTHORIZED: Final = 4
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

_EPILOG: Final = """\
\b
Exit codes:
  0    done
  1    failed; the reason is on stderr
  2    wrong usage
  3    no such sandbox, snapshot or template
  4    API key missing, unknown or not allowed
  130  interrupted by ctrl-C
exec and shell end with the code of the remote command (128 + n after
signal n); 124 after --timeout, 125 when aenv itself failed.

\b
Environment: AENV_API_URL, AENV_API_KEY, AENV_SANDBOX_URL, else
E2B_API_URL, E2B_API_KEY, E2B_SANDBOX_URL, else the file that `aenv auth`
writes. Output is a table on a terminal and JSON when piped or with --json.
"""

SLOTS: Final = {
    "auth": Slot("agentenv.cli.auth", "Store the server's URL and API key."),
    "create": Slot("agentenv.cli.create", "Start a sandbox."),
    "ls": Slot("agentenv.cli.ls", "List sandboxes."),
    "info": Slot("agentenv.cli.info", "Show one sandbox."),
    "exec": Slot("agentenv.cli.exec", "Run a command in a sandbox."),
    "shell": Slot("agentenv.cli.shell", "Open an interactive shell in a sandbox."),
    "ps": Slot("agentenv.cli.ps", "List the running commands of a sandbox."),
    "cp": Slot("agentenv.cli.cp", "Copy files to or from a sandbox."),
    "pause": Slot("agentenv.cli.pause", "Pause sandboxes with their memory."),
    "resume": Slot("agentenv.cli.resume", "Resume paused sandboxes."),
    "fork": Slot("agentenv.cli.fork", "Branch a running sandbox."),
    "snapshot": Slot("agentenv.cli.snapshot", "Create, list and delete snapshots."),
    "timeout": Slot("agentenv.cli.timeout", "Set when a sandbox expires."),
    "kill": Slot("agentenv.cli.kill", "Delete sandboxes."),
    "template": Slot("agentenv.cli.template", "List, build and delete templates."),
    "image": Slot("agentenv.cli.image", "Pull, list and forget OCI images; export snapshots."),
    "storage": Slot("agentenv.cli.storage", "Show, clean and verify what the node stores."),
    "node": Slot("agentenv.cli.node", "Show what the node says of itself."),
    "config": Slot("agentenv.cli.config", "Show the server's configuration."),
    "server": Slot("agentenv.cli.server", "Run the server.", server=True),
    "doctor": Slot("agentenv.cli.doctor", "Check whether this host can run sandboxes.", server=True),
    "completion": Slot("agentenv.cli.completion", "Print the completion script for a shell."),
    "version": Slot("agentenv.cli.version", "Print the version."),
}


class Root(LazyGroup):
    """The root group; its `main` never lets an expected error become a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        def inner() -> Any:
            Settings.debug_requested = False
            return super(Root, self).main(args, prog_name or "aenv", complete_var, False, **extra)

        return sys.exit(guarded(inner)) if standalone_mode else inner()

    def invoke(self, ctx: click.Context) -> Any:
        """Like click's, but click itself would turn a broken pipe into exit code 1."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error
        return result


class ReaderGone(Exception):
    """Nobody reads our standard output any more (`aenv ls | head`)."""


@click.pass_context
def _root(ctx: click.Context) -> None:
    ctx.ensure_object(Settings)


root = Root(
    SLOTS,
    name="aenv",
    callback=_root,
    params=global_options(hidden=False),
    help="Work with AgentENV sandboxes: microVMs that start, pause, fork and resume in milliseconds.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def guarded(run: Callable[[], Any]) -> int:
    """Run and give the exit code; errors become one line on stderr."""
    try:
        result = run()
        return result if isinstance(result, int) else 0
    except ReaderGone:
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort) as error:
        # So that the shell's next line does not begin behind `^C`; click has done it for what it caught itself.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            click.echo(err=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if Settings.debug_requested:
            import traceback

            traceback.print_exc()
        return report(error)


def report(error: Exception) -> int:
    """Print the one line for an error and give its exit code."""
    from agentenv.cli.text import one_line

    message, code = described(error)
    click.echo(f"aenv: {one_line(message)}", err=True)
    return code


def described(error: Exception) -> tuple[str, int]:
    """What to say about an error, and the exit code."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "aenv"
        return f"{error.format_message()} (see {where} --help)", EXIT_USAGE
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    from agentenv.errors import AenvError

    if not isinstance(error, AenvError):
        if isinstance(error, OSError):
            return str(error), EXIT_FAILURE
        return f"internal error: {type(error).__name__}: {error} (--debug shows where)", EXIT_FAILURE
    # Only now, because a command that raises these has loaded the client anyway.
    from agentenv.client import errors

    if isinstance(error, errors.KeyRejected):
        return f"{error}; `aenv auth` stores an API key, `aenv auth --show` tells which one is used", EXIT_UNAUTHORIZED
    if isinstance(error, (errors.Unauthorized, errors.PermissionDenied)):
        return str(error), EXIT_UNAUTHORIZED
    if isinstance(error, errors.NotFound):
        return str(error), EXIT_NOT_FOUND
    if isinstance(error, errors.ConnectionFailed):
        return f"{error}; is the server running? (`aenv auth --show` tells which address is used)", EXIT_FAILURE
    return str(error), EXIT_FAILURE
