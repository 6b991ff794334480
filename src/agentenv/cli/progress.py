"""Signs of life on stderr where a person waits for more than a second; nothing when stderr is not a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from agentenv.cli.text import one_line

if TYPE_CHECKING:
    from agentenv.cli._steps import StepDisplay
    from agentenv.client import Progress

PATIENCE_S: Final = 1.0


@contextlib.asynccontextmanager
async def waiting(label: str) -> AsyncIterator[None]:
    """Show a spinner with `label` from the second second on."""
    if not sys.stderr.isatty():
        yield
        return
    spinner = asyncio.create_task(_spin(label))
    try:
        yield
    finally:
        spinner.cancel()
        await asyncio.gather(spinner, return_exceptions=True)


async def _spin(label: str) -> None:
    await asyncio.sleep(PATIENCE_S)
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(one_line(label))):
        await asyncio.Event().wait()


class Steps:
    """The steps of a long call, as the server tells them: `take` is called for every sign of progress.

    Use as a context on a running loop. What is shown appears after a person's patience and disappears at the end.
    """

    def __init__(self) -> None:
        self._latest: Progress | None = None
        self._display: StepDisplay | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Steps:
        if sys.stderr.isatty():
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._appear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._display is not None:
            self._display.close()

    def take(self, progress: Progress) -> None:
        """Show this step instead of the one before."""
        self._latest = progress
        self._draw()

    def _appear(self) -> None:
        from agentenv.cli._steps import StepDisplay

        self._display = StepDisplay()
        self._draw()

    def _draw(self) -> None:
        if self._display is not None and self._latest is not None:
            latest = self._latest
            self._display.show(one_line(latest.text), latest.done_bytes, latest.total_bytes)


class TransferBar:
    """The progress of one file or archive: bytes so far, of a total where it is known.

    `advance` is called for every piece; the bar appears once the transfer has taken longer than a person's patience.
    """

    def __init__(self, label: str, total_bytes: int | None) -> None:
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._shown: object | None = None
        self._begin_s = asyncio.get_running_loop().time()
        self._is_terminal = sys.stderr.isatty()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> TransferBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def advance(self, count_bytes: int) -> None:
        """Count bytes that went over the wire."""
        self._done += count_bytes
        if not self._is_terminal:
            return
        if self._shown is None and asyncio.get_running_loop().time() - self._begin_s > PATIENCE_S:
            self._show()
        if self._shown is not None:
            self._progress.update(self._task, completed=self._done)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._shown = self._exit.enter_context(self._progress)
        self._task = self._progress.add_task(one_line(self._label), total=self._total)
