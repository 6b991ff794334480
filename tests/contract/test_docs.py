"""Documents that are generated from code, or must name what the code has."""

from __future__ import annotations

from pathlib import Path

from bench.bench import PROMISES

from agentenv.lifecycle.diagram import mermaid
from agentenv.server.config_page import page

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


def test_the_configuration_page_is_what_the_settings_say() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == page(), "run: python -m agentenv.server.config_page"


def test_every_measure_of_the_benchmark_is_specified() -> None:
    specified = (ROOT / "SPECIFICATION.md").read_text()
    assert [name for name in PROMISES if f"`{name}`" not in specified] == []
