"""Fixtures of the CLI's tests: a fake server and `aenv` as a real process against it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import API_KEY, FakeServer

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
