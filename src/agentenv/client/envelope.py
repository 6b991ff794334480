"""The framing of Connect streams: one flag byte, a big-endian 32-bit length, the message. Bytes in, messages out.

Pure; no I/O. A message with flag 2 ends the stream and carries either nothing or the stream's error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from agentenv.client.errors import ProtocolError

HEADER: Final = struct.Struct(">BI")
FLAG_COMPRESSED: Final = 1
FLAG_END: Final = 2
# The daemon sends at most 32 KiB of output per message, 43 KiB as base64; this leaves room and bounds the memory.
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024


def encode(message: bytes, flags: int = 0) -> bytes:
    """One message in its envelope."""
    return HEADER.pack(flags, len(message)) + message


class Decoder:
    """Reassembles messages from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Every (flags, message) that is complete now.

        Raises `ProtocolError` for a compressed message (none was offered), an unknown flag, or one over the limit.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                flags, length = HEADER.unpack_from(self._buffer, start)
                if flags not in (0, FLAG_END):
                    raise ProtocolError(f"stream message with flags {flags:#x}, which were not negotiated")
                if length > MESSAGE_BYTES_MAX:
                    raise ProtocolError(f"stream message of {length} bytes, above the limit of {MESSAGE_BYTES_MAX}")
                end = start + HEADER.size + length
                if len(self._buffer) < end:
                    break
                message = bytes(self._buffer[start + HEADER.size : end])
                start = end
                yield flags, message
        finally:
            # Once per piece rather than once per message: removing the front of a bytearray moves the rest.
            del self._buffer[:start]

    @property
    def pending(self) -> int:
        """Bytes of a message that is not complete; not zero at the end of a stream means it was cut."""
        return len(self._buffer)
