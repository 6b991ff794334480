"""JSON documents that somebody else wrote."""

from __future__ import annotations

import json
from typing import Any

from agentenv.errors import ImageError


def json_value(raw: bytes, origin: str, bytes_max: int) -> Any:
    """What the document says. Raises `ImageError` naming `origin`; more than `bytes_max` are not read at all."""
    if len(raw) > bytes_max:
        raise ImageError(f"{origin}: {len(raw)} bytes; the limit is {bytes_max}")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{origin}: not JSON ({error})") from error


def json_object(raw: bytes, origin: str, bytes_max: int) -> dict[str, Any]:
    """As `json_value`, for a document that has to be an object."""
    body = json_value(raw, origin, bytes_max)
    if not isinstance(body, dict):
        raise ImageError(f"{origin}: not a JSON object")
    return body
