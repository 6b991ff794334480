"""Forgets tracked connections of the calling thread's namespace, so that no packet passes as "established" any more.

One netlink message of the conntrack subsystem; a library would cost more lines than the message.
"""

from __future__ import annotations

import os
import socket
import struct

_NETLINK_NETFILTER = 12
# (NFNL_SUBSYS_CTNETLINK << 8) | IPCTNL_MSG_CT_DELETE
_DELETE = (1 << 8) | 2
_NLM_F_REQUEST_ACK = 1 | 4
_CTA_MARK, _CTA_MARK_MASK = 8, 21
_NLMSG_HEADER = struct.Struct("=IHHII")
# nfgenmsg: address family 0 (all), version 0, resource 0.
_NFGENMSG = bytes(4)
_ACK_DEADLINE_S = 2.0


def flush(mark: int | None = None) -> None:
    """Delete all entries, or only those with this connection mark. Raises OSError."""
    attributes = b""
    if mark is not None:
        attributes = b"".join(
            struct.pack("=HH", 8, kind) + struct.pack(">I", value)
            for kind, value in ((_CTA_MARK, mark), (_CTA_MARK_MASK, 0xFFFFFFFF))
        )
    length = _NLMSG_HEADER.size + len(_NFGENMSG) + len(attributes)
    message = _NLMSG_HEADER.pack(length, _DELETE, _NLM_F_REQUEST_ACK, 1, 0) + _NFGENMSG + attributes
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.settimeout(_ACK_DEADLINE_S)
        netlink.send(message)
        answer = netlink.recv(4096)
    # The answer is NLMSG_ERROR: the header, then the negative errno, 0 for success.
    (code,) = struct.unpack_from("=i", answer, _NLMSG_HEADER.size)
    if code != 0:
        raise OSError(-code, os.strerror(-code))
