"""What the tests of the API share besides fixtures."""

from __future__ import annotations

from typing import Any, Final

import httpx

KEY: Final = "e2b_" + "0123456789abcdef0123456789abcdef01234567"


async def start(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """A started sandbox of the template `base`."""
    answer = await client.post("/v2/sandboxes", json={"templateID": "base", **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made
