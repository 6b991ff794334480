"""The proxy's process as the server sees it: adopted where it runs already, replaced where its address changed.

The proxy outlives the server on purpose: streams to guests go on while the server restarts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from agentenv.errors import AenvError, OperationFailed
from agentenv.processes import RecordedProcess, recorded
from agentenv.routing import ProxyControl
from agentenv.server.daemon import launch

log = logging.getLogger(__name__)

START_S_MAX: Final = 10.0
STOP_S_MAX: Final = 5.0
POLL_S: Final = 0.02


class ProxyDaemon:
    """Starts, adopts and stops aenv-proxy for one run directory."""

    def __init__(self, bin_dir: Path, run_dir: Path, log_dir: Path, listen: str, domain: str) -> None:
        self._launcher = bin_dir / "aenv-launch"
        self._record = run_dir / "proxy.json"
        self._log = log_dir / "proxy.log"
        self._command = [
            str(bin_dir / "aenv-proxy"),
            "--listen",
            listen,
            "--api",
            str(run_dir / "api.sock"),
            "--resolver",
            str(run_dir / "internal.sock"),
            "--control",
            str(run_dir / "proxy.sock"),
            "--domain",
            domain,
        ]
        self.control = ProxyControl(run_dir / "proxy.sock")

    async def ensure(self) -> None:
        """A proxy with our command line runs and answers when this returns. Raises `OperationFailed`."""
        process = recorded(self._record)
        if process is not None and list(process.argv) == self._command:
            return await self._answering(process)
        if process is not None:
            log.info("the proxy runs with another command line and is replaced")
            await process.stop(STOP_S_MAX)
        process = await launch(self._launcher, self._record, self._log, self._command)
        return await self._answering(process)

    def is_alive(self) -> bool:
        return recorded(self._record) is not None

    async def stop(self) -> None:
        """End it, with whatever streams it carries."""
        process = recorded(self._record)
        if process is not None:
            await process.stop(STOP_S_MAX)
        self._record.unlink(missing_ok=True)

    async def _answering(self, process: RecordedProcess) -> None:
        until = time.monotonic() + START_S_MAX
        while True:
            try:
                await self.control.health()
                return
            except AenvError as error:
                if not process.is_alive():
                    raise OperationFailed(f"the proxy ended while it started: {self._last_words()}") from error
                if time.monotonic() > until:
                    silent = f"the proxy did not answer within {START_S_MAX:g} s; see {self._log}"
                    raise OperationFailed(silent) from error
                await asyncio.sleep(POLL_S)

    def _last_words(self) -> str:
        try:
            return self._log.read_text(errors="replace").strip().splitlines()[-1]
        except (OSError, IndexError):
            return f"see {self._log}"


class ProxyWithdrawals:
    """The proxy for owner tasks: a proxy that is not there has no streams to cut."""

    def __init__(self, control: ProxyControl) -> None:
        self._control = control

    async def withdraw(self, generations: list[int]) -> int:
        """See `node.host.Withdrawals`."""
        try:
            return await self._control.withdraw(generations)
        except AenvError as error:
            log.warning("generations %s were not withdrawn: %s", generations, error)
            return 0
