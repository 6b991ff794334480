"""The client library behind `aenv`: async, with only httpx beneath; imports nothing of the server.

async with AenvClient() as client:
    sandbox = await client.sandboxes.create("base", timeout_s=600)
    result = await sandbox.run("uname -a")
"""

from agentenv.client.client import AenvClient
from agentenv.client.credentials import Credentials
from agentenv.client.errors import ApiError, ClientError, TransportError
from agentenv.client.process import Ended, Process, ProcessEvent, PtyOutput, PtySize, Stderr, Stdout
from agentenv.client.sandbox import RunResult, Sandbox
from agentenv.client.values import EntryInfo, ProcessInfo, SandboxInfo, SnapshotInfo, TemplateInfo

__all__ = [
    "AenvClient",
    "ApiError",
    "ClientError",
    "Credentials",
    "Ended",
    "EntryInfo",
    "Process",
    "ProcessEvent",
    "ProcessInfo",
    "PtyOutput",
    "PtySize",
    "RunResult",
    "Sandbox",
    "SandboxInfo",
    "SnapshotInfo",
    "Stderr",
    "Stdout",
    "TemplateInfo",
    "TransportError",
]
