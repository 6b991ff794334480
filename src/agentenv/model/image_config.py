"""What a sandbox takes from the configuration of its OCI image (OCI image specification, "Image Configuration").

Functions of the whole document, which manifests keep as it came, so that an export gives it back. An empty one stands
for a disk that is of no image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Whom commands and file calls are for where the image names nobody: E2B's user.
DEFAULT_USER: Final = "user"


def image_user(document: Mapping[str, Any]) -> str:
    """The user's name or number, without the group that may follow it."""
    user = str(_config(document).get("User") or "").partition(":")[0]
    return user or DEFAULT_USER


def image_workdir(document: Mapping[str, Any]) -> str:
    """The working directory; "" for the user's home."""
    return str(_config(document).get("WorkingDir") or "")


def image_environment(document: Mapping[str, Any]) -> dict[str, str]:
    """`Env` as a mapping; entries without a name or a value are left out."""
    pairs = (str(entry).partition("=") for entry in _config(document).get("Env") or ())
    return {name: value for name, separator, value in pairs if name and separator}


def _config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Builders write null for what is empty."""
    config = document.get("config")
    return config if isinstance(config, Mapping) else {}
