"""The tail of a guest's serial console, bounded on every side.

Owns the connection to the VMM's console socket and at most `CONSOLE_BYTES_MAX` of what came through it. Why a socket
and not a file: a guest can print for ever, also while the server is down, and a file that only the server trims would
fill the host's disk. On a socket the kernel bounds what is under way, and with nobody connected QEMU
drops output without stalling the guest. The price: what is printed while no server runs is not kept.

On `close` the tail is written to a file, so that the next server's `adopt` begins with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

CONSOLE_BYTES_MAX = 64 << 10
# QEMU writes byte by byte and the kernel queues only some hundred such writes. A guest's console driver waits 10 ms for
# room and then overwrites: so a burst is drained faster than that, and loses nothing.
_DRAIN_PAUSE_S = 0.005
# A guest that prints on and on, past this much and this fast, may wake the server ten times a second and no more; its
# console then has gaps.
_BURST_BYTES = 256 << 10
_REFILL_BYTES_PER_S = 16 << 10
_FLOOD_PAUSE_S = 0.1
_RECEIVE_BYTES = 256 << 10


class Console:
    """Collects in the background from `attach` on; `tail` works at any time, also after the VMM died."""

    def __init__(self, saved: Path) -> None:
        self._saved = saved
        self._tail = bytearray()
        self._socket: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._allowance = float(_BURST_BYTES)
        self._last_drain_s = 0.0
        with contextlib.suppress(OSError):
            self._keep(saved.read_bytes())

    def attach(self, path: Path) -> None:
        """Connect to the console socket of a started VMM. Without one the console stays empty: no error."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            return
        self._socket = connection
        self._listen()

    def tail(self, bytes_max: int) -> bytes:
        """The last `bytes_max` bytes received, at most `CONSOLE_BYTES_MAX`."""
        self._drain()
        return bytes(self._tail[-bytes_max:]) if bytes_max > 0 else b""

    def close(self) -> None:
        """Disconnect and save the tail for the next server. A full disk loses the tail, nothing else."""
        self._drain()
        self._disconnect()
        with contextlib.suppress(OSError):
            self._saved.write_bytes(self._tail)

    def _listen(self) -> None:
        self._pause = None
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        if self._socket is not None:
            loop.remove_reader(self._socket.fileno())
        received = self._drain()
        elapsed_s, self._last_drain_s = loop.time() - self._last_drain_s, loop.time()
        self._allowance = min(_BURST_BYTES, self._allowance + elapsed_s * _REFILL_BYTES_PER_S) - received
        if self._socket is not None:
            pause_s = _DRAIN_PAUSE_S if self._allowance > 0 else _FLOOD_PAUSE_S
            self._pause = loop.call_later(pause_s, self._listen)

    def _drain(self) -> int:
        """Take what is there, without waiting; return the number of bytes."""
        if self._socket is None:
            return 0
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            received = b""
        if received:
            self._keep(received)
        else:
            self._disconnect()
        return len(received)

    def _keep(self, received: bytes) -> None:
        self._tail += received
        del self._tail[:-CONSOLE_BYTES_MAX]

    def _disconnect(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._socket is not None:
            with contextlib.suppress(RuntimeError):  # no running loop: there is no reader either
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
