"""Documents that are generated from code, or must name what the code has."""

from __future__ import annotations

from pathlib import Path

from agentenv.lifecycle.diagram import mermaid

ROOT = Path(__file__).parents[2]


def test_the_lifecycle_diagram_in_architecture_is_the_table() -> None:
    assert mermaid() in (ROOT / "ARCHITECTURE.md").read_text(), "paste `python -m agentenv.lifecycle.diagram`"


def test_the_code_map_names_every_package_and_crate() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src/agentenv").glob("*/__init__.py")]
    crates = [path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml")]
    missing = [name for name in packages if f"src/agentenv/{name}`" not in text and f"`{name}`" not in text]
    missing += [name for name in crates if f"crates/{name}`" not in text]
    assert missing == []
