"""Applies nftables transactions through libnftables, the library behind `nft`, in the calling thread's namespace.

In process, because a policy change is on the path of every start: 0.5 ms here, 4 ms as a process. Each call makes its
own context, whose netlink socket belongs to the namespace of the thread that made it.
"""

from __future__ import annotations

import ctypes
import functools
import threading

from agentenv.errors import HostUnsuitable
from agentenv.network._steps import NftError

# The library keeps a process-wide cache of interfaces and promises nothing about threads; a call takes under 1 ms.
_lock = threading.Lock()


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnftables.so.1")
    except OSError as error:
        raise HostUnsuitable("libnftables.so.1 is missing: install the package nftables") from error
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_ctx_free.argtypes = [ctypes.c_void_p]
    for buffer in (library.nft_ctx_buffer_error, library.nft_ctx_buffer_output):
        buffer.argtypes = [ctypes.c_void_p]
    library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
    library.nft_ctx_get_error_buffer.argtypes = [ctypes.c_void_p]
    library.nft_ctx_get_output_buffer.restype = ctypes.c_char_p
    library.nft_ctx_get_output_buffer.argtypes = [ctypes.c_void_p]
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return library


def apply(commands: str) -> str:
    """Apply all of `commands` in one transaction or none; return what it printed. Raises `NftError`."""
    library = _library()
    with _lock:
        context = library.nft_ctx_new(0)
        if not context:
            raise NftError("nft_ctx_new failed")
        try:
            library.nft_ctx_buffer_error(context)
            library.nft_ctx_buffer_output(context)
            result = library.nft_run_cmd_from_buffer(context, commands.encode())
            output: bytes = library.nft_ctx_get_output_buffer(context) or b""
            error: bytes = library.nft_ctx_get_error_buffer(context) or b""
        finally:
            library.nft_ctx_free(context)
    if result != 0:
        raise NftError(error.decode(errors="replace").strip())
    return output.decode(errors="replace")
