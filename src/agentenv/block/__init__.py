"""Client of aenv-blockd: disks and memory images as files, captures, layers.

Owns the control connection (`BlockClient`), starting and finding the daemon (`BlockDaemon`) and a fake of the whole
(`FakeBlock`). Does not own names, paths or pins: the caller decides what is exported and when it goes.
"""

from agentenv.block.client import BlockClient
from agentenv.block.daemon import BlockDaemon
from agentenv.block.fake import FakeBlock
from agentenv.block.wire import (
    CachedBlob,
    CacheState,
    CaptureFinished,
    CaptureStarted,
    CompactResult,
    DigestResult,
    ExportInfo,
    Hello,
    ImportResult,
    MergeResult,
    SealResult,
    Stats,
)

__all__ = [
    "BlockClient",
    "BlockDaemon",
    "CacheState",
    "CachedBlob",
    "CaptureFinished",
    "CaptureStarted",
    "CompactResult",
    "DigestResult",
    "ExportInfo",
    "FakeBlock",
    "Hello",
    "ImportResult",
    "MergeResult",
    "SealResult",
    "Stats",
]
