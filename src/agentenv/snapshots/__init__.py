"""Committed snapshots: where their layers and records lie, who needs them, and what may be collected.

Owns staging, the repository (a directory or a bucket, perhaps shared by nodes) and the argument why nothing that was
acknowledged is lost. Does not own captures (blockd writes layers) nor the node's cache of remote blocks. Imports
`model`, `clock` and `errors` only.
"""

from agentenv.snapshots.blobs import ids_of, is_digest
from agentenv.snapshots.catalog import Catalog, parse_reference
from agentenv.snapshots.checking import LayerChecker, PlainChecker, WorkerChecker
from agentenv.snapshots.codec import decode_manifest, encode_manifest
from agentenv.snapshots.committed import Changes, CommittedRepository
from agentenv.snapshots.converted import Converted, ConvertedLayers
from agentenv.snapshots.gclock import Process, Timing
from agentenv.snapshots.names import Reservation
from agentenv.snapshots.publishing import (
    LinkPublisher,
    PlainPublisher,
    Publisher,
    WorkerOptions,
    WorkerPublisher,
)
from agentenv.snapshots.staging import Staging, new_local_id
from agentenv.snapshots.stores import MemoryStore, PosixStore, Store

__all__ = [
    "Catalog",
    "Changes",
    "CommittedRepository",
    "Converted",
    "ConvertedLayers",
    "LayerChecker",
    "LinkPublisher",
    "MemoryStore",
    "PlainChecker",
    "PlainPublisher",
    "PosixStore",
    "Process",
    "Publisher",
    "Reservation",
    "Staging",
    "Store",
    "Timing",
    "WorkerChecker",
    "WorkerOptions",
    "WorkerPublisher",
    "decode_manifest",
    "encode_manifest",
    "ids_of",
    "is_digest",
    "new_local_id",
    "parse_reference",
]
