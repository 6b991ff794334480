"""Chain keys: names of "this OCI layer over that chain of layers, on a disk of this size, by this conversion".

Pure. Equal keys mean that one conversion serves both, whichever images the layers are part of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from agentenv.images.source import ImageLayer

# Raised when equal input would be converted to something else that must not be mixed with the old: the file system's
# features, the meaning of a whiteout. One line for each:
# 1: ext4 as in templates/ext4.py, one layer for each OCI layer.
CONVERSION_VERSION: Final = 1
# The tar of nothing, as tools pad it: Docker wrote such layers for each ENV and CMD of old.
EMPTY_TAR: Final = bytes(1024)
_EMPTY_DIFF_IDS: Final = frozenset(
    "sha256:" + hashlib.sha256(content).hexdigest() for content in (b"", EMPTY_TAR, bytes(10_240))
)
EMPTY_DIFF_ID: Final = "sha256:" + hashlib.sha256(EMPTY_TAR).hexdigest()


def chain_keys(size_bytes: int, diff_ids: Iterable[str]) -> list[str]:
    """One key for each layer, bottom first: 64 hexadecimal digits."""
    keys: list[str] = []
    below = ""
    for diff_id in diff_ids:
        text = f"aenv-chain {CONVERSION_VERSION}\n{size_bytes}\n{below}\n{diff_id}\n"
        below = hashlib.sha256(text.encode()).hexdigest()
        keys.append(below)
    return keys


def without_empty(layers: Sequence[ImageLayer]) -> list[ImageLayer]:
    """The layers that change anything."""
    return [layer for layer in layers if layer.diff_id not in _EMPTY_DIFF_IDS]
