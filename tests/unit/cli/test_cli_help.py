"""Help pages: in step with the commands, with docs/cli.md, and complete."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agentenv.cli import _help
from agentenv.cli.app import SLOTS, root
from agentenv.cli.lazy import LazyGroup, Slot, load
from agentenv.cli.template import command as template

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"
LAZY = [(name, slot) for group in (SLOTS, template.slots) for name, slot in group.items()]


def available(slot: Slot) -> click.Command | None:
    try:
        return load(slot)
    except click.ClickException:
        assert slot.server
        return None


@pytest.mark.parametrize(("name", "slot"), LAZY, ids=[name for name, _ in LAZY])
def test_line_in_the_table_is_the_first_sentence_of_the_command(name, slot):
    command = available(slot)
    if command is None:
        pytest.skip("the server's command is not installed")
    assert command.help is not None
    # The server's own commands are written elsewhere and may say it their way.
    if not slot.server:
        assert command.help.strip().split("\n\n")[0].replace("\n", " ") == slot.help


def test_docs_are_what_help_prints():
    assert DOCS.read_text() == _help.document(), "run: python -m agentenv.cli._help > docs/cli.md"


def test_every_parameter_is_explained():
    for path, command in walk(root, "aenv"):
        assert command.help, path
        for param in command.params:
            assert isinstance(param, click.Argument) or param.help, f"{path} {param.name}"


def walk(command, path):
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            slot = command.slots.get(name) if isinstance(command, LazyGroup) else None
            child = available(slot) if slot else command.get_command(click.Context(command), name)
            if child is not None and not (slot and slot.server):
                yield from walk(child, f"{path} {name}")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["template"], ["snapshot", "--help"], ["exec", "-h"]])
def test_help_goes_to_stdout_with_code_0(arguments):
    result = CliRunner().invoke(root, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: aenv")


def test_server_command_without_server_says_what_to_install(monkeypatch):
    slot = Slot("agentenv.cli.not_there", "Run the server.", server=True)
    monkeypatch.setitem(root.slots, "server", slot)
    result = CliRunner().invoke(root, ["server", "--port", "1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("aenv: this command needs the server")
    assert result.stderr.rstrip().endswith("install agentenv[server]")


def test_server_command_with_a_missing_dependency_says_so_too(monkeypatch, tmp_path):
    (tmp_path / "needs_server.py").write_text("import fastapi_is_not_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("agentenv.cli.lazy.SERVER_MODULES", frozenset({"fastapi_is_not_here"}))
    monkeypatch.setitem(root.slots, "doctor", Slot("needs_server", "Check.", server=True))
    result = CliRunner().invoke(root, ["doctor"])
    assert (result.exit_code, "fastapi_is_not_here is missing" in result.stderr) == (1, True)
