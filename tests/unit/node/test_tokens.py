"""Derived secrets and the file they derive from."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.node.tokens import Tokens, load_or_create_secret


def test_a_secret_is_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert load_or_create_secret(path) == load_or_create_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    load_or_create_secret(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_or_create_secret(path)


def test_a_symlink_and_a_damaged_secret_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("00" * 32)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        load_or_create_secret(tmp_path / "link")
    damaged = tmp_path / "damaged"
    damaged.write_text("00ff")
    damaged.chmod(0o600)
    with pytest.raises(ConfigError, match="32 bytes"):
        load_or_create_secret(damaged)


def test_tokens_differ_by_sandbox_and_by_purpose_and_are_stable() -> None:
    tokens = Tokens(b"x" * 32)
    made = {tokens.envd("a"), tokens.envd("b"), tokens.traffic("a"), tokens.traffic("b")}
    assert len(made) == 4
    assert tokens.envd("a") == Tokens(b"x" * 32).envd("a")
    assert tokens.envd("a") != Tokens(b"y" * 32).envd("a")
