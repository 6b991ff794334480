"""Committed snapshots: where their layers and records lie on this node, and what may be collected.

Owns the repository directory. Does not own captures (blockd writes layers), names of sandboxes, or who uses what at
run time: the caller hands in the set of layers that running things still need. Imports `model` and `errors` only.
"""

from agentenv.snapshots.catalog import Catalog, parse_reference
from agentenv.snapshots.codec import decode_manifest, encode_manifest
from agentenv.snapshots.repository import Repository, new_layer_id

__all__ = ["Catalog", "Repository", "decode_manifest", "encode_manifest", "new_layer_id", "parse_reference"]
