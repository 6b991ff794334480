"""Every help page as one document: `python -m agentenv.cli._help > docs/cli.md`; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator

import click

from agentenv.cli.app import root

WIDTH_CHARS = 100


def pages(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str]]:
    """(command path, help text) of a command and all below it; commands that are not installed are left out."""
    yield ctx.command_path, ctx.get_help()
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(ctx):
        try:
            child = command.get_command(ctx, name)
        except click.ClickException:
            continue
        if child is not None and not child.hidden:
            yield from pages(child, _context(child, name, ctx))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings = dict(command.context_settings)
    settings.update(terminal_width=WIDTH_CHARS, max_content_width=WIDTH_CHARS)
    return click.Context(command, info_name=name, parent=parent, **settings)


def document() -> str:
    """The whole of docs/cli.md."""
    parts = [
        "# The command line",
        "Made from `--help` by `python -m agentenv.cli._help > docs/cli.md`. Every command also takes the options of",
        "`aenv` itself (`--json`, `--api-url`, `--api-key`, `--debug`), before or after its name.",
    ]
    text = parts[0] + "\n\n" + "\n".join(parts[1:]) + "\n"
    for path, page in pages(root, _context(root, "aenv", None)):
        text += f"\n## {path}\n\n```text\n{page.strip()}\n```\n"
    return text


if __name__ == "__main__":
    click.echo(document(), nl=False)
