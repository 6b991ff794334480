"""STATE/stores.json, the settings of a bucket, the encryption key, and what a server says of them when it starts."""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.config import Config, load
from agentenv.errors import ConfigError
from agentenv.server.stores import StoresFile, encryption_key, oss_settings

KEY = "0123456789abcdef" * 4


def configured(tmp_path: Path, **oss: object) -> Config:
    config = load(None, {"AENV_SERVER_STATE_DIR": str(tmp_path)})
    given = dataclasses.replace(config.snapshot.oss, bucket="b", region="r", **oss)  # type: ignore[arg-type]
    return dataclasses.replace(config, snapshot=dataclasses.replace(config.snapshot, backend="oss", oss=given))


def key_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "storage.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


# The file


def test_the_file_is_for_its_owner_alone_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stores.json"
    StoresFile(path, KEY, {"kind": "s3"}).write()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_bytes()) == {
        "stores": {"repository": {"kind": "s3"}},
        "registries": {},
        "encryption_key": KEY,
    }
    before = path.stat().st_ino
    StoresFile(path, None, None).write()
    assert path.stat().st_ino != before
    assert json.loads(path.read_bytes()) == {"stores": {}, "registries": {}, "encryption_key": None}
    assert [entry.name for entry in path.parent.iterdir()] == ["stores.json"]


def test_registries_stay_over_a_restart_and_are_written_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "stores.json"
    file = StoresFile(path, None, None)
    file.add_registry("host:5000", {"url": "https://host:5000"})
    written = path.stat()
    file.add_registry("host:5000", {"url": "https://host:5000"})
    assert path.stat().st_ino == written.st_ino
    file.add_registry("host:5000", {"url": "https://host:5000", "username": "u"})
    again = StoresFile(path, None, None)
    again.write()
    assert json.loads(path.read_bytes())["registries"] == {"host:5000": {"url": "https://host:5000", "username": "u"}}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_torn_file_is_made_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stores.json"
    path.write_bytes(content)
    StoresFile(path, KEY, None).write()
    assert json.loads(path.read_bytes())["encryption_key"] == KEY


# The bucket


@pytest.mark.parametrize(
    ("endpoint", "given", "expected"),
    [
        ("", "auto", "virtual"),
        ("https://s3.example.net", "auto", "path"),
        ("", "path", "path"),
        ("https://s3.example.net", "virtual", "virtual"),
    ],
)
def test_addresses_are_of_the_usual_kind_unless_somebody_says_so(
    tmp_path: Path, endpoint: str, given: str, expected: str
) -> None:
    settings = oss_settings(configured(tmp_path, endpoint=endpoint, addressing=given), {}, tmp_path)
    assert (settings.addressing, settings.endpoint) == (expected, endpoint or None)


def test_an_endpoint_without_tls_is_allowed_because_it_was_written_out(tmp_path: Path) -> None:
    assert oss_settings(configured(tmp_path, endpoint="http://127.0.0.1:9000"), {}, tmp_path).allow_http
    assert not oss_settings(configured(tmp_path, endpoint="https://s3.example.net"), {}, tmp_path).allow_http


def test_a_file_of_credentials_comes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "[default]\naws_access_key_id=d\naws_secret_access_key=secret-d\n"
        "[prod]\naws_access_key_id=p\naws_secret_access_key=secret-p\n"
    )
    environ = {"AWS_ACCESS_KEY_ID": "e", "AWS_SECRET_ACCESS_KEY": "secret-e"}
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "e"),
        ({"credentials_file": file}, "d"),
        ({"credentials_file": file, "profile": "prod"}, "p"),
    ]
    for given, expected in cases:
        found = oss_settings(configured(tmp_path, **given), environ, tmp_path).credentials
        assert found is not None
        assert found.access_key_id == expected
        assert found.secret_access_key not in repr(found)


def test_a_file_of_credentials_that_is_missing_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, credentials_file=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"snapshot\.oss\.credentials_file: .*nowhere"):
        oss_settings(config, {}, tmp_path)


def test_without_keys_the_clients_own_chain_is_used(tmp_path: Path) -> None:
    settings = oss_settings(configured(tmp_path), {}, tmp_path)
    assert settings.credentials is None
    assert settings.worker_entry()["access_key_id"] is None


# The key


def test_a_key_is_64_hexadecimal_digits_whatever_surrounds_them(tmp_path: Path) -> None:
    assert encryption_key(None) is None
    for content in (KEY.encode(), KEY.upper().encode() + b"\n", b"  " + KEY.encode() + b" \n"):
        assert encryption_key(key_file(tmp_path, content)) == KEY
    assert encryption_key(key_file(tmp_path, KEY.encode(), 0o400)) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o666, 0o610])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"snapshot\.encryption_key_file: .*chmod 600"):
        encryption_key(key_file(tmp_path, KEY.encode(), mode))


@pytest.mark.parametrize(
    "content",
    [b"", KEY[:-1].encode(), KEY.encode() + b"0", KEY[:-1].encode() + b"g", KEY.encode() * 8, bytes(32), b"\xff" * 64],
)
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = key_file(tmp_path, content)
    with pytest.raises(ConfigError, match=r"^snapshot\.encryption_key_file: ") as caught:
        encryption_key(path)
    assert str(path) in str(caught.value)
    assert KEY[:16] not in str(caught.value)


def missing(path: Path) -> None:
    """Nothing is there."""


def a_link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text(KEY)
    target.chmod(0o600)
    path.symlink_to(target)


def a_folder(path: Path) -> None:
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("make", [missing, a_link, a_folder])
def test_what_is_no_file_of_its_own_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "key"
    make(path)
    with pytest.raises(ConfigError, match=r"snapshot\.encryption_key_file: .*cannot be read"):
        encryption_key(path)
