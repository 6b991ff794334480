"""API keys: which headers count, and which files are trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import httpx
import pytest
from api_case import KEY

from agentenv.api.keys import KEY_PATTERN, ApiKeys, load_or_create
from agentenv.errors import ConfigError

Client = httpx.AsyncClient
OTHER = "e2b_" + "f" * 40


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("X-API-KEY", KEY)], 200),
        ([("Authorization", f"Bearer {KEY}")], 200),
        ([("Authorization", f"bearer  {KEY} ")], 200),
        ([("X-API-KEY", KEY), ("Authorization", "Bearer sk_other")], 200),
        ([("X-API-KEY", OTHER), ("Authorization", f"Bearer {KEY}")], 401),
        ([("X-API-KEY", KEY), ("X-API-KEY", KEY)], 401),
        ([("X-API-KEY", KEY.upper())], 401),
        ([("X-API-KEY", KEY + "0")], 401),
        ([("X-API-KEY", "x" * 10_000)], 401),
        ([("X-API-KEY", "\u00e9")], 401),
        ([("Authorization", f"Basic {KEY}")], 401),
        ([], 401),
    ],
)
async def test_exactly_one_key_decides(client: Client, headers: list[tuple[str, str]], status: int) -> None:
    del client.headers["X-API-KEY"]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    assert (await client.get("/v2/sandboxes", headers=raw)).status_code == status


def test_the_file_is_made_once_with_a_key_that_old_sdks_accept(tmp_path: Path) -> None:
    path = tmp_path / "api_keys"
    load_or_create(path)
    key = path.read_text().strip()
    assert KEY_PATTERN.fullmatch(key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create(path).accepts(key)
    assert path.read_text().strip() == key
    assert [entry.name for entry in tmp_path.iterdir()] == ["api_keys"]


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_several_keys_and_comments(tmp_path: Path) -> None:
    keys = load_or_create(write(tmp_path / "k", f"# first\n{KEY} # mine\n\n  {OTHER}\n"))
    assert keys.accepts(KEY)
    assert keys.accepts(OTHER)
    assert not keys.accepts("# first")
    assert not keys.accepts("")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "e2b_short\n", KEY.upper() + "\n", "\0" * 10])
def test_a_file_that_holds_anything_else_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_or_create(write(tmp_path / "k", text))
    assert KEY.upper() not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_or_create(write(tmp_path / "k", KEY, mode))


def test_symlinks_are_not_followed_not_even_dangling_ones(tmp_path: Path) -> None:
    target = write(tmp_path / "real", KEY)
    for name, destination in (("link", target), ("dangling", tmp_path / "nowhere")):
        link = tmp_path / name
        link.symlink_to(destination)
        with pytest.raises(ConfigError, match="symlink"):
            load_or_create(link)
    assert not (tmp_path / "nowhere").exists()


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(ConfigError, match="regular"):
        load_or_create(fifo)


@pytest.mark.host
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "k", KEY)
    os.chown(path, 1, 1)
    with pytest.raises(ConfigError, match="belongs to user 1"):
        load_or_create(path)


def test_no_key_at_all_is_refused() -> None:
    with pytest.raises(ConfigError):
        ApiKeys([])


def test_the_first_key_is_the_one_of_the_first_line(tmp_path: Path) -> None:
    assert load_or_create(write(tmp_path / "k", f"{OTHER}\n{KEY}\n")).first() == OTHER
