"""How a command answers: a table or words on a terminal, JSON when piped or asked for.

The JSON is the API's own objects, so that a script which knows the API knows the output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from agentenv.cli.settings import Settings
from agentenv.cli.text import one_line, printable


def wants_json(settings: Settings) -> bool:
    """JSON when asked for or when nobody looks at a terminal."""
    return settings.json or not sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Indented JSON with a line end; non-ASCII as it is, lone surrogates as escapes."""
    written = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        written.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        written = json.dumps(value, indent=2)
    click.echo(written)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, fixed: int = 1) -> None:
    """A table as wide as the terminal; the first `fixed` columns (ids) are never cut."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        is_fixed = index < fixed
        width = max((len(row[index]) for row in rows), default=0) if is_fixed else None
        table.add_column(column, no_wrap=True, min_width=width, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False, markup=False, emoji=False).print(table)


def note(message: str) -> None:
    """A remark for a person, on stderr and only on a terminal."""
    if sys.stderr.isatty():
        click.echo(one_line(message), err=True)


def complain(message: str) -> None:
    """An error that does not end the command (one of many files or ids)."""
    click.echo(f"aenv: {one_line(message)}", err=True)
