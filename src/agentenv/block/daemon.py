"""Starts, finds and stops keeper and blockd of one node.

Both watch each other and survive the server; each writes its own process record (RUN/keeper.json, RUN/blockd.json) when
it takes the place of a dead one. So a server that restarts finds them by the socket first, by the records second.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

from agentenv.block.client import BlockClient
from agentenv.block.wire import Hello
from agentenv.errors import BlockError, HostUnsuitable
from agentenv.processes import RecordedProcess, recorded

PROTOCOL_VERSION: Final = 1
START_S_MAX: Final = 20.0
STOP_S_MAX: Final = 15.0
_POLL_S: Final = 0.005
_LOG_TAIL_BYTES: Final = 2000


class BlockDaemon:
    """The pair of one state directory. Holds nothing but paths; every method looks at what is there."""

    def __init__(
        self,
        *,
        bin_dir: Path,
        run_dir: Path,
        state_dir: Path,
        serve_threads: int | None = None,
        capture_buffer_bytes_max: int | None = None,
        stores: Path | None = None,
        cache_dir: Path | None = None,
        cache_size_bytes_max: int | None = None,
        memory_outage_s: int | None = None,
    ) -> None:
        """`stores` (stores.json), `cache_dir` and `cache_size_bytes_max` go together: without them blockd refuses
        descriptors of remote blobs as "unsupported". `memory_outage_s`: how long a memory image waits for a store.
        """
        if len({stores is None, cache_dir is None, cache_size_bytes_max is None}) != 1:
            raise ValueError("stores, cache_dir and cache_size_bytes_max go together")
        self._bin_dir = bin_dir
        self._run_dir = run_dir
        self._state_dir = state_dir
        self._options: list[str] = []
        if serve_threads is not None:
            self._options += ["--serve-threads", str(serve_threads)]
        if capture_buffer_bytes_max is not None:
            self._options += ["--capture-buffer-bytes-max", str(capture_buffer_bytes_max)]
        if stores is not None:
            self._options += ["--stores", str(stores), "--cache-dir", str(cache_dir)]
            self._options += ["--cache-size-bytes-max", str(cache_size_bytes_max)]
        if memory_outage_s is not None:
            self._options += ["--memory-outage-s", str(memory_outage_s)]

    @property
    def socket(self) -> Path:
        """The control socket, for `BlockClient`."""
        return self._run_dir / "blockd.sock"

    @property
    def memory_mount(self) -> Path:
        """Where memory images appear."""
        return self._state_dir / "mnt" / "memory"

    @property
    def disk_mount(self) -> Path:
        """Where disks appear."""
        return self._state_dir / "mnt" / "disks"

    @property
    def log(self) -> Path:
        """What both print; one line per event."""
        return self._state_dir / "logs" / "blockd.log"

    def is_running(self) -> bool:
        """Whether either of the two is there, by their records."""
        return bool(self._processes())

    async def ensure(self) -> Hello:
        """Find the daemon or start it; returns once it answers.

        Raises `HostUnsuitable` (no binary, no /dev/fuse, not root: the message says which), `BlockError` when it does
        not answer in time or speaks another version of the protocol.
        """
        if not self._processes():
            await self._launch()
        hello = await self._answering()
        if hello.version != PROTOCOL_VERSION:
            raise BlockError(f"blockd speaks protocol {hello.version}, this server {PROTOCOL_VERSION}", "unsupported")
        return hello

    async def stop(self) -> None:
        """End both in order and unmount; kill what does not end. Idempotent; also cleans up after both were killed."""
        running = self._processes()
        if keeper := recorded(self._run_dir / "keeper.json"):
            keeper.signal(signal.SIGTERM)
        elif running:
            # A blockd whose keeper died this instant.
            await self._ask_to_stop()
        if not await self._gone(running, STOP_S_MAX):
            # Twice: whichever survives the first round may have started the other anew.
            for _ in range(2):
                running |= self._processes()
                for process in running:
                    process.signal(signal.SIGKILL)
                await self._gone(running, 1.0)
        await self._unmount_leftovers()

    def _processes(self) -> set[RecordedProcess]:
        records = (recorded(self._run_dir / name) for name in ("keeper.json", "blockd.json"))
        return {process for process in records if process is not None}

    async def _launch(self) -> None:
        launcher, program = self._bin_dir / "aenv-launch", self._bin_dir / "aenv-blockd"
        for binary in (launcher, program):
            if not os.access(binary, os.X_OK):
                raise HostUnsuitable(f"{binary} is missing or not executable; build it or set server.bin_dir")
        for folder in (self._run_dir, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        child = await asyncio.create_subprocess_exec(
            *(str(launcher), "--record", str(self._run_dir / "keeper.json"), "--log", str(self.log)),
            *("--oom-score-adj", "-900") if _may_lower_oom_score() else (),
            *("--", str(program), "keeper", *self._folders(), *self._options),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await child.communicate()
        if child.returncode != 0:
            raise HostUnsuitable(f"blockd was not started: {errors.decode(errors='replace').strip()}")

    def _folders(self) -> list[str]:
        pairs = {
            "--run-dir": self._run_dir,
            "--state-dir": self._state_dir / "blockd",
            "--memory-mount": self.memory_mount,
            "--disk-mount": self.disk_mount,
        }
        return [part for name, path in pairs.items() for part in (name, str(path))]

    async def _answering(self) -> Hello:
        client = BlockClient(self.socket, deadlines_s={"hello": START_S_MAX})
        hello = asyncio.create_task(client.hello())
        try:
            while not hello.done():
                await asyncio.wait([hello], timeout=0.1)
                if not hello.done() and not self._processes():
                    # It ended at once: its last words say why, and waiting longer would not.
                    raise HostUnsuitable(f"blockd does not run: {self._last_words()}")
            return hello.result()
        finally:
            hello.cancel()
            await asyncio.gather(hello, return_exceptions=True)
            await client.close()

    async def _ask_to_stop(self) -> None:
        client = BlockClient(self.socket)
        try:
            await client.shutdown()
        except BlockError:
            return
        finally:
            await client.close()

    async def _gone(self, known: set[RecordedProcess], wait_s_max: float) -> bool:
        """Whether those known, and whatever was recorded since, end in time. A record goes before its process does."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s_max
        while known := {process for process in known | self._processes() if process.is_alive()}:
            if loop.time() >= until:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _unmount_leftovers(self) -> None:
        """What a killed pair left mounted. The connection is dead, so nothing is asked of the mount itself."""
        mounted = Path("/proc/self/mounts").read_text().splitlines()
        for mount in (self.memory_mount, self.disk_mount):
            here = str(mount.parent.resolve() / mount.name)
            for _ in [line for line in mounted if line.split()[1:3] == [here, "fuse.aenv"]]:
                child = await asyncio.create_subprocess_exec("umount", "-l", "-i", here)
                await child.wait()

    def _last_words(self) -> str:
        try:
            return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip().replace("\n", "; ")
        except OSError:
            return f"nothing in {self.log}"


def _may_lower_oom_score() -> bool:
    """CAP_SYS_RESOURCE (bit 24); a container may lack it, and then the daemons do without."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & 1 << 24)
    return False
