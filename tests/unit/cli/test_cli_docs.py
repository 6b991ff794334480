"""The operators' page names only commands and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from agentenv.cli.app import root

PAGE = Path(__file__).parents[3] / "docs" / "storage.md"
# As code in a sentence, or as a line of a shell block up to its comment.
COMMANDS = sorted(set(re.findall(r"(?:`|^)aenv ([^`#\n]+?)\s*(?:`|#|$)", PAGE.read_text(), re.MULTILINE)))


def test_commands_are_found():
    assert {"storage", "storage gc", "storage verify", "storage repair"} <= set(COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_exists(line):
    command: click.Command | None = root
    for word in line.split():
        assert command is not None
        if word.startswith("-"):
            assert any(word in param.opts for param in command.params), f"{line}: no option {word}"
        elif isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
            assert command is not None, f"{line}: no command {word}"
