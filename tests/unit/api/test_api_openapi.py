"""The committed description is the one that the code generates, and it is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

from agentenv.api.openapi import document, text
from agentenv.api.routes import ENDPOINTS

SPEC = Path(__file__).parents[3] / "spec" / "openapi.json"


def test_the_committed_file_is_up_to_date() -> None:
    assert SPEC.read_text() == text(), "run: uv run --extra server python -m agentenv.api.openapi spec/openapi.json"


def test_every_reference_resolves() -> None:
    schemas = document()["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text()))
    assert references <= schemas.keys()


def test_every_route_has_a_summary_and_unique_operation_id() -> None:
    operations = [operation for path in document()["paths"].values() for operation in path.values()]
    assert len(operations) == len(ENDPOINTS)
    assert len({operation["operationId"] for operation in operations}) == len(ENDPOINTS)
    assert all(operation["summary"] for operation in operations)


def test_no_success_with_204_describes_a_body() -> None:
    operations = [operation for path in document()["paths"].values() for operation in path.values()]
    assert not any("content" in operation["responses"].get("204", {}) for operation in operations)
    assert json.loads(text())["openapi"].startswith("3.1")
