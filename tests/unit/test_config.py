"""Configuration: every source, every refusal by name, and what is derived."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from agentenv import config as config_module
from agentenv.config import SETTINGS, effective, load
from agentenv.errors import ConfigError


def from_toml(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> Any:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load(path, environ or {})


@pytest.fixture(autouse=True)
def no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "DEFAULT_PATH", tmp_path / "none.toml")


def test_defaults_without_any_source() -> None:
    config = load(environ={})
    assert config.server.listen == "127.0.0.1:8000"
    assert config.sandbox.timeout_s_default == 300
    assert config.sandbox.on_timeout == "pause"
    assert config.sandbox.fork_count_max == 100
    assert set(config.sources.values()) == {"default"}


def test_the_keys_that_users_meet_are_all_there() -> None:
    assert {
        "server.listen",
        "server.domain",
        "server.state_dir",
        "server.api_keys_file",
        "virtualization.driver",
        "virtualization.accelerator",
        "snapshot.backend",
        "snapshot.posix_fs.path",
        "sandbox.timeout_s_default",
        "sandbox.on_timeout",
        "sandbox.fork_count_max",
    } <= SETTINGS.keys()


def test_every_setting_has_help_and_an_environment_name_of_its_own() -> None:
    assert all(item.help for item in SETTINGS.values())
    assert len({item.env_name for item in SETTINGS.values()}) == len(SETTINGS)
    assert SETTINGS["snapshot.posix_fs.path"].env_name == "AENV_SNAPSHOT_POSIX_FS_PATH"


def test_every_default_is_within_its_own_limits() -> None:
    for item in SETTINGS.values():
        if item.minimum is not None and item.maximum is not None:
            assert item.minimum <= item.default <= item.maximum, item.key
        if item.choices:
            assert item.default in item.choices, item.key


def test_the_environment_wins_over_the_file_and_the_sources_are_remembered(tmp_path: Path) -> None:
    text = '[sandbox]\nfork_count_max = 5\ntimeout_s_default = 60\n[snapshot.posix_fs]\npath = "/snap"\n'
    config = from_toml(tmp_path, text, {"AENV_SANDBOX_FORK_COUNT_MAX": "7"})
    assert (config.sandbox.fork_count_max, config.sandbox.timeout_s_default) == (7, 60)
    assert config.repository_dir == Path("/snap")
    assert config.sources["sandbox.fork_count_max"] == "AENV_SANDBOX_FORK_COUNT_MAX"
    assert config.sources["sandbox.timeout_s_default"] == str(tmp_path / "config.toml")
    assert config.sources["sandbox.on_timeout"] == "default"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sandbox]\nfork_count_max = 0\n", "sandbox.fork_count_max"),
        ("[sandbox]\nfork_count_max = 1001\n", "sandbox.fork_count_max"),
        ("[sandbox]\nfork_count_max = true\n", "sandbox.fork_count_max"),
        ("[sandbox]\nfork_count_max = 1.5\n", "sandbox.fork_count_max"),
        ('[sandbox]\nfork_count_max = "5"\n', "sandbox.fork_count_max"),
        ("[sandbox]\nstart_wait_s_max = nan\n", "sandbox.start_wait_s_max"),
        ("[sandbox]\nstart_wait_s_max = inf\n", "sandbox.start_wait_s_max"),
        ('[sandbox]\non_timeout = "delete"\n', "sandbox.on_timeout"),
        ("[sandbox]\ntimeout_s_max = 10\n", "sandbox.timeout_s_default"),
        ("[sandbox]\nfork_count = 1\n", "sandbox.fork_count"),
        ("sandbox = 5\n", "sandbox"),
        ("[sandboxes]\n", "sandboxes"),
        ("[sandbox.inner]\nx = 1\n", "sandbox.inner.x"),
        ('[server]\nlisten = "8000"\n', "server.listen"),
        ('[server]\nlisten = "localhost:8000"\n', "server.listen"),
        ('[server]\nlisten = "127.0.0.1:0"\n', "server.listen"),
        ('[server]\nlisten = "127.0.0.1:70000"\n', "server.listen"),
        ('[server]\ndomain = "https://x"\n', "server.domain"),
        ('[server]\nstate_dir = "relative"\n', "server.state_dir"),
        ('[server]\nstate_dir = ""\n', "server.state_dir"),
        ('[server]\nrun_dir = "/' + "x" * 80 + '"\n', "server.run_dir"),
        ('[network]\nsubnet = "10.12.0.1/16"\n', "network.subnet"),
        ('[network]\nsubnet = "10.12.0.0/30"\n', "network.subnet"),
        ('[network]\nsubnet = "fd00::/64"\n', "network.subnet"),
        ("[network]\ndns = []\n", "network.dns"),
        ('[network]\ndns = ["one.one"]\n', "network.dns"),
        ("[network]\ndns = [1]\n", "network.dns"),
        ('[virtualization]\ndriver = "xen"\n', "virtualization.driver"),
        ('[snapshot]\nbackend = "nfs"\n', "snapshot.backend"),
        ('[snapshot]\nbackend = "oss"\n[snapshot.oss]\nbucket = "b"\n', "snapshot.oss.region"),
        ('[snapshot]\nbackend = "oss"\n[snapshot.oss]\nregion = "r"\n', "snapshot.oss.bucket"),
        ('[snapshot.oss]\nendpoint = "s3.example.net"\n', "snapshot.oss.endpoint"),
        ('[snapshot.oss]\nprefix = "/a"\n', "snapshot.oss.prefix"),
        ('[snapshot.oss]\naddressing = "dns"\n', "snapshot.oss.addressing"),
        ('[snapshot]\ncompression = "gzip"\n', "snapshot.compression"),
        ("[cache]\nsize_bytes_max = 1\n", "cache.size_bytes_max"),
        ('[images]\nmirrors = ["https://mirror"]\n', "images.mirrors"),
    ],
)
def test_what_is_unknown_or_out_of_range_is_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_toml(tmp_path, text)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "text",
    [
        "[p2p]\nenabled = true\n",
    ],
)
def test_features_of_later_versions_are_refused_as_such(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not in this version"):
        from_toml(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("AENV_SANDBOX_FORK_COUNT_MAX", "many", "sandbox.fork_count_max"),
        ("AENV_SANDBOX_FORK_COUNT_MAX", "0", "sandbox.fork_count_max"),
        ("AENV_SANDBOX_FORK_COUNT_MAX", "", "sandbox.fork_count_max"),
        ("AENV_SANDBOX_FORK", "1", "AENV_SANDBOX_FORK"),
        ("AENV_SNAPSHOT_OSS_BUCKETS", "b", "AENV_SNAPSHOT_OSS_BUCKETS"),
        ("AENV_LIMITS_REQUEST_S_MAX", "nan", "limits.request_s_max"),
        ("AENV_SERVER_STATE_DIR", "here", "server.state_dir"),
    ],
)
def test_the_environment_is_checked_too(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={name: value})
    assert str(caught.value).startswith(expected)


def test_variables_of_the_client_are_not_ours_to_judge() -> None:
    load(environ={"AENV_API_URL": "http://x", "AENV_API_KEY": "y", "PATH": "/bin"})


def test_lists_are_comma_separated_in_the_environment() -> None:
    assert load(environ={"AENV_NETWORK_DNS": "9.9.9.9, 1.1.1.1"}).network.dns == ("9.9.9.9", "1.1.1.1")


@pytest.mark.parametrize("content", [b"[server\n", b"\xff\xfe", b'listen = "a"\nlisten = "b"\n'])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        load(path, {})


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path) -> None:
    load(None, {})
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "missing.toml", {})


def test_the_run_directory_follows_from_the_real_state_directory(tmp_path: Path) -> None:
    real = tmp_path / "state"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    expected = Path("/run/aenv") / hashlib.sha256(str(real).encode()).hexdigest()[:10]
    assert load(environ={"AENV_SERVER_STATE_DIR": str(link)}).run_dir == expected


@pytest.mark.parametrize(
    ("environ", "domain", "host"),
    [
        ({}, "localhost:8000", "localhost"),
        ({"AENV_SERVER_LISTEN": "[::1]:9000"}, "localhost:9000", "localhost"),
        ({"AENV_SERVER_DOMAIN": "sandbox.example.com"}, "sandbox.example.com", "sandbox.example.com"),
    ],
)
def test_the_domain_makes_get_host_usable(environ: dict[str, str], domain: str, host: str) -> None:
    config = load(environ=environ)
    assert (config.domain, config.domain_host) == (domain, host)


def test_effective_shows_every_key_with_derived_values_and_sources() -> None:
    rows = {item.key: (value, source) for item, value, source in effective(load(environ={"AENV_SERVER_DOMAIN": "d"}))}
    assert rows.keys() == SETTINGS.keys()
    assert rows["server.domain"] == ("d", "AENV_SERVER_DOMAIN")
    assert rows["server.api_keys_file"] == (Path("/var/lib/aenv/api_keys"), "derived")
    assert rows["sandbox.fork_count_max"] == (100, "default")


def test_the_configuration_cannot_be_changed() -> None:
    config = load(environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.server.listen = "x"
    with pytest.raises(TypeError):
        config.sources["x"] = "y"
