"""Imports point one way (design, section 9). Folders are the table's lines; the walk is by syntax, nothing is run.

    model <- lifecycle <- node <- api, routing <- server
    vmm, network, block, guest, snapshots never import each other, nor node
    client and cli never import the server, nor what only the server depends on
    lifecycle takes and returns values: no clock, no randomness, no I/O

An import inside a function or under TYPE_CHECKING counts: it is the same arrow, only later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2] / "src" / "agentenv"
PACKAGE: Final = "agentenv"

# Values and views of the host that everybody may know.
BASE: Final = frozenset({"errors", "model", "clock", "processes"})
BUILDING_BLOCKS: Final = frozenset({"vmm", "network", "block", "guest", "snapshots"})

# What each folder (or top-level module) may import of the package, beside itself.
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "__init__": frozenset(),
    "errors": frozenset(),
    "clock": frozenset(),
    "processes": frozenset(),
    "_setting": frozenset({"errors"}),
    "_storage_settings": frozenset({"errors", "_setting"}),
    "config": frozenset({"errors", "_setting", "_storage_settings"}),
    "model": frozenset({"errors"}),
    "lifecycle": frozenset({"errors", "model"}),
    **dict.fromkeys(BUILDING_BLOCKS, BASE),
    "images": BASE | {"block"},
    "templates": BASE | {"block", "guest", "images", "snapshots", "vmm", "node.interface", "node.host"},
    "node": BASE | BUILDING_BLOCKS | {"lifecycle"},
    "routing": BASE | {"node.interface"},
    "api": BASE | {"config", "routing", "node.interface"},
    "cluster": BASE | {"routing"},
    "server": BASE | BUILDING_BLOCKS | {"api", "config", "node", "routing", "templates", "images", "lifecycle"},
    "client": frozenset({"errors"}),
    "cli": frozenset({"errors", "client"}),
}

# Single modules that may do more than their folder, each with its reason. They are imported only when their own
# command is invoked (`cli.lazy` marks them), so a machine without the server still has every other command.
_SERVER_COMMAND: Final = frozenset({"config", "server"})
EXTRA: Final[Mapping[str, frozenset[str]]] = {
    "cli.server": _SERVER_COMMAND,
    "cli.config": frozenset({"config"}),
    "cli.doctor": _SERVER_COMMAND | BUILDING_BLOCKS,
    "cli.template_build": _SERVER_COMMAND | {"templates"},
}

# Distributions that only the extra `server` brings.
SERVER_ONLY: Final = frozenset(
    {"httptools", "msgspec", "obstore", "pyroute2", "starlette", "structlog", "uvicorn", "uvloop"}
)
WITHOUT_SERVER: Final = ("client", "cli", "errors", "model", "clock", "config", "_setting", "_storage_settings")
# Installed with the server's own commands, and used only by them.
MAY_USE_SERVER_ONLY: Final = frozenset(EXTRA) - {"cli.config"}

# Pure folders name what they may use of the standard library: a list of what they may not would never be complete.
PURE: Final = ("lifecycle",)
PURE_STANDARD: Final = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "itertools",
        "math",
        "operator",
        "re",
        "types",
        "typing",
    }
)


@dataclass(frozen=True, slots=True)
class Arrow:
    """`importer` (a module without the package's name) imports `imported` (a full dotted name) at `line`."""

    importer: str
    imported: str
    line: int


def arrows(importer: str, source: str, *, is_package: bool = False) -> Iterator[Arrow]:
    """Every import of one module, wherever it stands; relative ones are resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Arrow(importer, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(importer, node, is_package)
            for alias in node.names:
                # `from agentenv import config` imports a module; `from agentenv.config import load` a name of one.
                yield Arrow(importer, f"{base}.{alias.name}" if base in _PARENTS else base, node.lineno)


_PARENTS: Final = (PACKAGE, f"{PACKAGE}.node")


def _absolute(importer: str, node: ast.ImportFrom, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE, *importer.split(".")]
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def complaint(arrow: Arrow) -> str | None:
    """Why the arrow is forbidden, and what would be right; None when it is allowed."""
    folder = arrow.importer.partition(".")[0]
    where = f"src/agentenv/{arrow.importer.replace('.', '/')}.py:{arrow.line}"
    top, _, inner = arrow.imported.partition(".")
    if top != PACKAGE:
        return _foreign_complaint(arrow, folder, top, where)
    if folder not in ALLOWED:
        return f"{where}: the folder {folder!r} is not in the table of tests/contract/test_imports.py; add its line"
    target = inner.partition(".")[0]
    # `from agentenv import __version__` is a name of the package itself.
    if target in ("", "__version__", folder):
        return None
    allowed = ALLOWED[folder] | EXTRA.get(arrow.importer, frozenset())
    if target in allowed or any(inner == name or inner.startswith(name + ".") for name in allowed):
        return None
    narrower = sorted(name for name in allowed if name.startswith(target + "."))
    hint = (
        f"only {', '.join(narrower)} of it" if narrower else f"it may import {', '.join(sorted(allowed)) or 'nothing'}"
    )
    return f"{where}: {folder} must not import {arrow.imported}; {hint} (design, section 9)"


def _foreign_complaint(arrow: Arrow, folder: str, top: str, where: str) -> str | None:
    if top in SERVER_ONLY and folder in WITHOUT_SERVER and arrow.importer not in MAY_USE_SERVER_ONLY:
        return f"{where}: {folder} must not import {top}, which only `agentenv[server]` installs"
    if folder in PURE and top not in PURE_STANDARD:
        return f"{where}: {folder} is pure and must not import {top}; pass the value in instead"
    return None


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its name without `agentenv.`; a folder's `__init__` by the folder's."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        yield ".".join(named), path


def test_imports_point_one_way() -> None:
    complaints = [
        found
        for name, path in modules()
        for arrow in arrows(name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
        if (found := complaint(arrow)) is not None
    ]
    assert not complaints, "\n" + "\n".join(complaints)


FORBIDDEN: Final = [
    ("model.ids", "from agentenv.lifecycle import table"),
    ("lifecycle.table", "import asyncio"),
    ("lifecycle.table", "from time import monotonic"),
    ("lifecycle.table", "import random"),
    ("lifecycle.table", "import socket"),
    ("lifecycle.table", "from agentenv.clock import Clock"),
    ("lifecycle.machine", "from agentenv.node.interface import NodeInterface"),
    ("vmm.qemu", "from agentenv.network import slot"),
    ("network.slot", "from agentenv import block"),
    ("block.client", "from agentenv.snapshots import Staging"),
    ("guest.client", "def later():\n    from agentenv.vmm import driver"),
    ("snapshots.codec", "from agentenv.node.record import Record"),
    ("vmm.driver", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agentenv.node.node import Node"),
    ("vmm.driver", "from ..network import slot"),
    ("node.owner", "from agentenv.api.errors import ANSWERS"),
    ("node.node", "from agentenv.config import Config"),
    ("api.app", "from agentenv.node.node import Node"),
    ("api.app", "from agentenv.node import node"),
    ("api.app", "import agentenv.vmm.qemu"),
    ("routing", "from agentenv.node import owner"),
    ("client.api", "from agentenv.api import create_app"),
    ("client.api", "import msgspec"),
    ("cli.ls", "from agentenv.server.serve import serve"),
    ("cli.ls", "import structlog"),
    ("cli.config", "import starlette.applications"),
    ("errors", "from agentenv.model import ids"),
    ("processes", "from agentenv.vmm import driver"),
    ("misc.helpers", "from agentenv.errors import AenvError"),
]

PERMITTED: Final = [
    ("model.ids", "import secrets"),
    (
        "lifecycle.machine",
        "from agentenv.model import SandboxState\nfrom . import table\nfrom collections.abc import Mapping",
    ),
    ("vmm.qemu", "from agentenv.vmm.driver import Driver\nfrom agentenv.errors import VmmError\nimport asyncio"),
    ("node.owner", "from agentenv.vmm import Vmm\nfrom agentenv.lifecycle import table"),
    (
        "api.app",
        "from agentenv.node.interface import NodeInterface\nfrom agentenv.node import interface\nimport starlette",
    ),
    ("cli.server", "from agentenv.server.serve import serve\nimport uvicorn"),
    ("cli.ls", "from agentenv.client import AenvClient\nimport click"),
]


@pytest.mark.parametrize(("importer", "source"), FORBIDDEN)
def test_a_planted_arrow_is_found(importer: str, source: str) -> None:
    found = [complaint(arrow) for arrow in arrows(importer, source)]
    assert any(found), f"{importer}: {source!r} went unnoticed"


@pytest.mark.parametrize(("importer", "source"), PERMITTED)
def test_a_right_arrow_is_let_through(importer: str, source: str) -> None:
    assert [found for arrow in arrows(importer, source) if (found := complaint(arrow))] == []


def test_a_relative_import_of_a_package_itself_is_resolved() -> None:
    found = list(arrows("vmm", "from .driver import Driver\nfrom .. import network", is_package=True))
    assert [arrow.imported for arrow in found] == ["agentenv.vmm.driver", "agentenv.network"]


def test_the_complaint_says_where_and_what_would_be_right() -> None:
    text = complaint(Arrow("api.app", "agentenv.node.node", 7))
    assert text is not None
    assert text.startswith(
        "src/agentenv/api/app.py:7: api must not import agentenv.node.node; only node.interface of it"
    )
