"""The node's own calls to envd: /init after every boot and restore. The SDKs' traffic is the proxy's.

One fresh connection per call and none kept: a connection must never survive into another generation of the VM.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import socket
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from agentenv.errors import GuestError, GuestUnresponsive

ENVD_PORT: Final = 49983
ENTROPY_BYTES: Final = 64
# A SYN that meets a guest which is not up yet is lost, and the kernel would repeat it after a whole second.
CONNECT_TIMEOUT_S: Final = 0.25
RETRY_PAUSE_S: Final = 0.004
RESPONSE_BYTES_MAX: Final = 64 * 1024
WARM_UP_S_MAX: Final = 20.0
_JSON_HEADERS: Final = ("Content-Type: application/json",)
# As the Python SDK sends them.
_RPC_HEADERS: Final = (
    "Content-Type: application/connect+json",
    "Connect-Protocol-Version: 1",
    "Connect-Timeout-Ms: 60000",
    "Keepalive-Ping-Interval: 50",
    "Transfer-Encoding: chunked",
)


@dataclass(frozen=True, slots=True)
class GuestIdentity:
    """What makes a restored guest this sandbox and no other.

    `is_same`: the guest was this sandbox when it was halted, so only clock, random pool and connections need care. Each
    thing left out is code that an emulated CPU need not translate before its first answer.
    """

    sandbox_id: str
    template_id: str
    # None for a sandbox without `secure`: envd then asks nobody for a token.
    access_token: str | None
    # The token that the guest holds from the snapshot's own time; presented to be allowed to change it.
    previous_token: str | None
    env_vars: dict[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str = ""
    is_same: bool = False


async def init(address: str, identity: GuestIdentity, generation: int, deadline_s: float) -> None:
    """Make the guest this sandbox: clock, random seed, host name, machine id, environment, token.

    Repeats until envd answers or `deadline_s` passed. Raises `GuestUnresponsive`, or `GuestError` when envd refused.
    """
    until = time.monotonic() + deadline_s
    last: Exception | None = None
    while (left := until - time.monotonic()) > 0:
        # Made anew for each try, so that the clock is right when it arrives.
        body = _init_body(identity, generation)
        try:
            call = _exchange(
                address, "POST", "/init", json.dumps(body).encode(), identity.previous_token, _JSON_HEADERS
            )
            status, text = await asyncio.wait_for(call, left)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            last = error
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        if status == 204:
            return
        raise GuestError(f"the guest daemon refused /init with {status}: {text[:200]}")
    raise GuestUnresponsive(f"the guest daemon did not answer within {deadline_s:g} s") from last


async def prepare_image(address: str, user: str, owner: str, workdir: str, deadline_s: float) -> None:
    """Make what the SDKs rely on and an image may lack: `user`, and `workdir` ("" for none), which is `owner`'s.

    For a guest without a token, while its template is built. Raises `GuestError` or `GuestUnresponsive`.
    """
    body = {"createUser": user, "defaultUser": owner, "createWorkdir": workdir}
    await _told(address, body, None, deadline_s, "prepare the image")


async def freeze_disk(address: str, token: str, deadline_s: float) -> None:
    """Have the guest write out its root file system and freeze it (ioctl FIFREEZE): its disk is then complete.

    There is no way back: the guest ends afterwards. Raises `GuestError` or `GuestUnresponsive`.
    """
    await _told(address, {"freezeDisk": True}, token or None, deadline_s, "write out its disk")


async def _told(address: str, body: dict[str, Any], token: str | None, deadline_s: float, what: str) -> None:
    """One /init that is not repeated."""
    try:
        call = _exchange(address, "POST", "/init", json.dumps(body).encode(), token, _JSON_HEADERS)
        status, text = await asyncio.wait_for(call, deadline_s)
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise GuestUnresponsive(f"the guest daemon did not answer when it was to {what}") from error
    if status != 204:
        raise GuestError(f"the guest daemon could not {what} ({status}): {text[:200]}")


async def warm_up(address: str, runs: int, token: str | None = None) -> None:
    """Walk the way of a client's first requests a few times, so that they find everything loaded and translated.

    Best effort: an image without a shell has less to warm. Raises nothing.
    """
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "true"]}, "stdin": False}).encode()
    envelope = b"\x00" + len(message).to_bytes(4, "big") + message
    for _ in range(runs):
        try:
            async with asyncio.timeout(WARM_UP_S_MAX):
                await _exchange(address, "POST", "/process.Process/Start", envelope, token, _RPC_HEADERS)
                await _exchange(address, "GET", "/health", b"", token, ())
        except (OSError, EOFError, TimeoutError, ValueError):
            return


def _init_body(identity: GuestIdentity, generation: int) -> dict[str, Any]:
    always = {
        "entropy": base64.b64encode(secrets.token_bytes(ENTROPY_BYTES)).decode(),
        "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "lifecycleID": str(generation),
    }
    if identity.is_same:
        return always
    return {
        **always,
        "sandboxID": identity.sandbox_id,
        "templateID": identity.template_id,
        "hostname": identity.sandbox_id,
        "machineID": secrets.token_hex(16),
        "accessToken": identity.access_token or "",
        "envVars": identity.env_vars,
        "defaultUser": identity.default_user,
        "defaultWorkdir": identity.default_workdir,
    }


async def _exchange(
    address: str, method: str, path: str, payload: bytes, token: str | None, headers: tuple[str, ...]
) -> tuple[int, str]:
    """One HTTP/1.1 request on a connection of its own; returns status and the text of the body."""
    head = [f"{method} {path} HTTP/1.1", f"Host: {address}:{ENVD_PORT}", "Connection: close", *headers]
    if token:
        head.append(f"X-Access-Token: {token}")
    chunked = "Transfer-Encoding: chunked" in headers
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload) if chunked else payload
    if payload and not chunked:
        head.append(f"Content-Length: {len(payload)}")
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, ENVD_PORT), CONNECT_TIMEOUT_S)
    try:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        # Only the head counts for a 204; waiting for the guest to close would cost a scheduling round under TCG.
        raw_head = await reader.readuntil(b"\r\n\r\n")
        status = int(raw_head.split(b" ", 2)[1])
        text = "" if status == 204 else (await _until_closed(reader)).decode(errors="replace")
        return status, text
    finally:
        writer.close()


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    """What follows, up to a limit beyond which nobody is interested."""
    received = b""
    while len(received) < RESPONSE_BYTES_MAX and (piece := await reader.read(RESPONSE_BYTES_MAX)):
        received += piece
    return received
