"""`aenv completion`: click's scripts; sandbox ids are completed by asking the server."""

from __future__ import annotations

import click

from agentenv.cli.settings import AenvCommand


@click.command(cls=AenvCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash:  source <(aenv completion bash)
    zsh:   source <(aenv completion zsh)
    fish:  aenv completion fish | source
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(completion(ctx.find_root().command, {}, "aenv", "_AENV_COMPLETE").source())
