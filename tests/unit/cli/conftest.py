"""Fixtures of the CLI's tests: a fake server and `aenv` as a real process against it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli.fake_server import API_KEY, FakeServer

from agentenv.cli.app import root

Aenv = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    root = tmp_path / "guest"
    (root / "home").mkdir(parents=True)
    fake = FakeServer(root)
    yield fake
    fake.close()


@pytest.fixture
def environ(server: FakeServer, tmp_path: Path) -> dict[str, str]:
    """A clean environment that points at the fake server."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "TERM": "xterm",
        "AENV_API_URL": server.url,
        "AENV_API_KEY": API_KEY,
    }


@pytest.fixture
def aenv(environ: dict[str, str], tmp_path: Path) -> Aenv:
    """Run `aenv ARGS...` to its end; standard input is /dev/null unless `stdin` is given."""

    def run(*args: str, stdin: bytes | None = None, env: dict[str, str] | None = None, cwd: Path = tmp_path):  # type: ignore[no-untyped-def]
        return subprocess.run(
            [sys.executable, "-m", "agentenv.cli", *args],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env={**environ, **(env or {})},
            cwd=cwd,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def cli(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run in this process; output is piped, so JSON."""
    for name in list(os.environ):
        if name.startswith(("AENV_", "E2B_")):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def run(*args: str, **kwargs: Any) -> Result:
        return CliRunner().invoke(root, list(args), **kwargs)

    return run


@pytest.fixture
def on_terminal(environ: dict[str, str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run as a process whose output is a terminal of 200 columns; gives (exit code, text without colours)."""

    def run(*args: str) -> tuple[int, str]:
        parent, child = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "agentenv.cli", *args],
            env={**environ, "COLUMNS": "200"},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=child,
            stderr=child,
        )
        os.close(child)
        seen = b""
        while True:
            try:
                piece = os.read(parent, 4096)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        os.close(parent)
        return process.wait(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r\n", "\n")

    return run
