"""Signs of life: on a terminal and after a while only, and free of other people's control characters."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys

import pytest

from agentenv.cli import progress
from agentenv.cli.text import duration, mebibytes, one_line, printable


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def screen(request, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    return Screen(request.param)


@contextlib.contextmanager
def as_stderr(screen):
    """In the test's body, because pytest puts its own stream in place after the fixtures have run."""
    before, sys.stderr = sys.stderr, screen
    try:
        yield
    finally:
        sys.stderr = before


async def test_spinner_shows_its_label_on_a_terminal_only(screen):
    with as_stderr(screen):
        async with progress.waiting("start \x1b[31m"):
            for _ in range(200):
                await asyncio.sleep(0)
    assert (r"start \x1b[31m" in screen.getvalue()) is screen.is_terminal


async def test_quick_work_shows_nothing(screen, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)
    with as_stderr(screen):
        async with progress.waiting("start"):
            pass
    assert screen.getvalue() == ""


async def test_bar_shows_on_a_terminal_only_and_disappears(screen):
    with as_stderr(screen), progress.TransferBar("a\nb", 100) as bar:
        await asyncio.sleep(0)
        bar.advance(50)
    assert ("a b" in screen.getvalue()) is screen.is_terminal


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (59.6, "1 min"), (3599, "59 min"), (7200, "2 h"), (200_000, "2 d"), (-5, "0 s")]
)
def test_durations(value, text):
    assert duration(value) == text


def test_text_for_people_moves_no_cursor():
    assert printable("é\x1b\n\u202e\udc80") == r"é\x1b\n\u202e\udc80"
    assert one_line("a\r\n  b") == "a b"
    assert (mebibytes(512), mebibytes(1536), mebibytes(1025)) == ("512 MiB", "1.5 GiB", "1025 MiB")
