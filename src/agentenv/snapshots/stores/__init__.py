"""Where a repository's objects lie: in memory (tests), in a directory, or in a bucket.

`oss` is not imported here: it needs a client library that a node without a bucket does not have to load.
"""

from agentenv.snapshots.stores.interface import Entry, Object, ObjectNotFound, PreconditionFailed, Store
from agentenv.snapshots.stores.memory import MemoryStore
from agentenv.snapshots.stores.posix import PosixStore

__all__ = ["Entry", "MemoryStore", "Object", "ObjectNotFound", "PosixStore", "PreconditionFailed", "Store"]
