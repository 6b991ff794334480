"""Removes everything of one state directory: VMMs, daemons, mounts, namespaces, sockets, files."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

from agentenv.block import BlockDaemon
from agentenv.config import Config
from agentenv.errors import HostUnsuitable
from agentenv.network import destroy_all, node_tag
from agentenv.processes import recorded
from agentenv.server.proxy import ProxyDaemon

GONE_S_MAX: Final = 10.0


async def clean(config: Config) -> None:
    """Idempotent. Raises `HostUnsuitable` while a server runs on the directory."""
    state, run = config.server.state_dir, config.run_dir
    if state.exists():
        _refuse_if_served(state)
    bin_dir = config.server.bin_dir
    await _kill_vmms(run / "vm")
    await ProxyDaemon(bin_dir, run, state / "logs", config.server.listen, config.domain_host).stop()
    await BlockDaemon(bin_dir=bin_dir, run_dir=run, state_dir=state).stop()
    await asyncio.to_thread(destroy_all, node_tag(run))
    await asyncio.to_thread(shutil.rmtree, run, True)
    with contextlib.suppress(OSError):
        # Shared by the nodes of this machine; it goes with the last one.
        run.parent.rmdir()
    await asyncio.to_thread(shutil.rmtree, state, True)


def _refuse_if_served(state: Path) -> None:
    lock = state / "server.lock"
    if not lock.exists():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HostUnsuitable(f"an aenv server still uses {state}; stop it first (ctrl-C or SIGTERM)") from error
    finally:
        os.close(descriptor)


async def _kill_vmms(runtime_root: Path) -> None:
    """Kill every VMM that was launched below the directory, and wait until its process is gone."""
    processes = [recorded(path) for path in runtime_root.glob("*/*.json")]
    for process in processes:
        if process is not None:
            await process.stop(GONE_S_MAX)
