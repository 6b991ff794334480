"""The client library behind `aenv`: async, with only httpx beneath; imports nothing of the server.

async with AenvClient() as client:
    sandbox = await client.sandboxes.create("base", timeout_s=600)
    result = await sandbox.run("uname -a")
"""

from agentenv.client.client import AenvClient
from agentenv.client.credentials import Credentials
from agentenv.client.errors import ApiError, ClientError, TransportError
from agentenv.client.images import ImageInfo
from agentenv.client.process import Ended, Process, ProcessEvent, PtyOutput, PtySize, Stderr, Stdout
from agentenv.client.progress import Progress
from agentenv.client.sandbox import RunResult, Sandbox
from agentenv.client.storage import Damage, GcReport, StorageReport, TierUsage, VerifyReport
from agentenv.client.values import EntryInfo, ProcessInfo, SandboxInfo, SnapshotInfo, TemplateInfo

__all__ = [
    "AenvClient",
    "ApiError",
    "ClientError",
    "Credentials",
    "Damage",
    "Ended",
    "EntryInfo",
    "GcReport",
    "ImageInfo",
    "Process",
    "ProcessEvent",
    "ProcessInfo",
    "Progress",
    "PtyOutput",
    "PtySize",
    "RunResult",
    "Sandbox",
    "SandboxInfo",
    "SnapshotInfo",
    "Stderr",
    "Stdout",
    "StorageReport",
    "TemplateInfo",
    "TierUsage",
    "TransportError",
    "VerifyReport",
]
