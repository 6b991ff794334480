"""A remote terminal on the local one: raw mode, size, and the way back whatever happens; used by `shell`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
import tty
from collections.abc import Iterator, Mapping
from typing import Final

from agentenv.cli import streams
from agentenv.cli.output import complain
from agentenv.cli.session import open_running, run
from agentenv.cli.settings import Settings
from agentenv.client import AenvClient, Ended, Process, PtyOutput, PtySize
from agentenv.client.errors import ClientError, NotFound
from agentenv.client.process import interactive_shell_argv

EXIT_AENV_FAILED: Final = 125
FAREWELL_TIMEOUT_S: Final = 5.0
_STDIN: Final = 0
_STDOUT: Final = 1
# Leaves the alternate screen, bracketed paste and mouse reports, shows the cursor, resets colours: what a full-screen
# program would have done had the connection let it.
_RESET: Final = b"\x1b[?1049l\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?25h\x1b[0m\r\n"


def interactive(
    settings: Settings, sandbox_id: str, *, user: str | None, cwd: str | None, env: Mapping[str, str]
) -> int:
    """Run the shell to its end; gives its exit code."""
    environment = {
        "TERM": os.environ.get("TERM", "xterm-256color"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        **({"COLORTERM": os.environ["COLORTERM"]} if "COLORTERM" in os.environ else {}),
        **env,
    }

    async def work(client: AenvClient) -> int:
        sandbox = await open_running(client, sandbox_id)
        starting = sandbox.start(
            interactive_shell_argv(), env=environment, cwd=cwd, user=user, stdin=True, pty=terminal_size()
        )
        async with starting as process:
            return await _Terminal(process).run()

    return run(settings, work)


def terminal_size() -> PtySize:
    """The size of the local terminal; 80 x 24 where it does not know."""
    try:
        size = os.get_terminal_size(_STDOUT)
    except OSError:
        return PtySize(80, 24)
    return PtySize(size.columns or 80, size.lines or 24)


@contextlib.contextmanager
def raw_mode() -> Iterator[list[object]]:
    """Keys go through untouched; the former mode comes back on every way out. Yields the former mode."""
    before = termios.tcgetattr(_STDIN)
    try:
        tty.setraw(_STDIN, termios.TCSADRAIN)
        yield before
    finally:
        with contextlib.suppress(termios.error):  # the terminal itself may be gone
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


class _Terminal:
    """One remote shell on the local terminal."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._resized = asyncio.Event()
        self._ended_by: signal.Signals | None = None

    async def run(self) -> int:
        main = asyncio.current_task()
        assert main is not None
        handlers = {
            signal.SIGWINCH: self._resized.set,
            signal.SIGCONT: self._continued,
            signal.SIGTERM: lambda: self._leave(main, signal.SIGTERM),
            signal.SIGHUP: lambda: self._leave(main, signal.SIGHUP),
        }
        is_clean = False
        with raw_mode(), streams.signals(handlers):
            helpers = [asyncio.create_task(self._send_keys()), asyncio.create_task(self._follow_size())]
            try:
                code = await self._show_output()
                is_clean = True
                return code
            except asyncio.CancelledError:
                if self._ended_by is None:
                    raise
                return 128 + self._ended_by
            finally:
                for task in helpers:
                    task.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
                if not is_clean:
                    await self._abandon()

    async def _show_output(self) -> int:
        async for event in self._process.events():
            if isinstance(event, Ended):
                return event.exit_code
            if isinstance(event, PtyOutput):
                _write_all(event.data)
        raise AssertionError("events() ends with Ended or raises")

    async def _send_keys(self) -> None:
        with contextlib.suppress(NotFound):
            async for keys in streams.pieces(_STDIN):
                await self._process.send_pty(keys)

    async def _follow_size(self) -> None:
        """Send the size when it has changed; several changes during one call become one."""
        sent = terminal_size()
        while True:
            await self._resized.wait()
            self._resized.clear()
            size = terminal_size()
            if size != sent:
                with contextlib.suppress(NotFound):
                    await self._process.resize(size)
                sent = size

    def _continued(self) -> None:
        """After a stop and `fg` the local shell has changed the mode and perhaps the size."""
        tty.setraw(_STDIN, termios.TCSADRAIN)
        self._resized.set()

    def _leave(self, main: asyncio.Task[object], number: signal.Signals) -> None:
        self._ended_by = number
        main.cancel()

    async def _abandon(self) -> None:
        """The local end goes away first: kill the shell, which would otherwise wait for keys for ever."""
        with contextlib.suppress(OSError):
            _write_all(_RESET)
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await self._process.kill()
        except (NotFound, TimeoutError):
            pass
        except ClientError as error:
            complain(f"the remote shell could not be ended: {error}")


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(_STDOUT, view) :]
