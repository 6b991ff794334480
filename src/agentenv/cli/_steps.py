"""How the steps of a long call look on a terminal; imported only where they are shown, because rich is slow to load."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from agentenv.cli.text import binary_size


class _Amount(ProgressColumn):
    """Bytes done of bytes in all, and nothing for a step that cannot be counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(binary_size(int(task.completed)) if task.completed else "")
        return Text(f"{binary_size(int(task.completed))} of {binary_size(int(task.total))}")


class StepDisplay:
    """One line with the step at hand; it disappears at the end."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Amount(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, text: str, done_bytes: int, total_bytes: int | None) -> None:
        """Replace what the line says. Elapsed time is that of the whole call."""
        self._progress.update(self._task, description=text, completed=done_bytes)
        # `update` takes None for "as before".
        self._progress.tasks[0].total = total_bytes

    def close(self) -> None:
        """Remove the line."""
        self._progress.stop()
