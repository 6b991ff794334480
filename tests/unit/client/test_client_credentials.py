"""Where URL and key come from, and that a key never goes to the wrong place or through an unsafe file."""

from __future__ import annotations

import os

import pytest

from agentenv.client import credentials
from agentenv.client.errors import ConfigurationError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "aenv" / "credentials.toml"


def found(path, *, api_url=None, api_key=None, **environ):
    result = credentials.resolve(api_url=api_url, api_key=api_key, environ=environ, path=path)
    return result.api_url, result.api_key, result.sandbox_url


def test_nothing_set_means_this_machine_without_key(path):
    assert found(path) == ("http://127.0.0.1:8000", None, "http://127.0.0.1:8000")


def test_order_is_option_aenv_e2b_file(path):
    credentials.write_file(path, api_url="http://file", api_key="f", sandbox_url="http://box")
    assert found(path) == ("http://file", "f", "http://box")
    e2b = {"E2B_API_URL": "http://e2b", "E2B_API_KEY": "e", "E2B_SANDBOX_URL": "http://e2b-box"}
    assert found(path, **e2b) == ("http://e2b", "e", "http://e2b-box")
    aenv = {"AENV_API_URL": "http://aenv/", "AENV_API_KEY": "a", "AENV_SANDBOX_URL": "http://aenv-box"}
    assert found(path, **e2b, **aenv) == ("http://aenv", "a", "http://aenv-box")
    assert found(path, api_url="http://o", api_key="o", **e2b, **aenv)[:2] == ("http://o", "o")


def test_the_files_key_goes_to_the_files_url_only(path):
    credentials.write_file(path, api_url="http://file", api_key="f")
    assert found(path, api_url="http://other")[1] is None
    assert found(path, AENV_API_URL="http://file/")[1] == "f"


def test_a_key_for_e2b_does_not_go_to_the_files_url(path):
    credentials.write_file(path, api_url="http://file", api_key="f")
    assert found(path, E2B_API_KEY="cloud")[1] == "f"


def test_file_is_private_and_replaced_whole(path):
    credentials.write_file(path, api_url="http://one", api_key='k"\\')
    credentials.write_file(path, api_url="http://two", api_key='k"\\')
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert credentials.read_file(path) == {"api_url": "http://two", "api_key": 'k"\\'}
    assert [item.name for item in path.parent.iterdir()] == ["credentials.toml"]


def test_unsafe_files_are_refused(path, tmp_path):
    credentials.write_file(path, api_url="http://one", api_key="k")
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        credentials.read_file(path)
    path.chmod(0o600)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    with pytest.raises(ConfigurationError):
        credentials.read_file(link)
    with pytest.raises(ConfigurationError, match="symlink"):
        credentials.write_file(link, api_url="http://x", api_key="k")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(ConfigurationError, match="regular"):
        credentials.read_file(fifo)


@pytest.mark.parametrize("content", ["api_url = 1", "surprise = 'x'", "not toml", "api_key = '" + "x" * 70_000 + "'"])
def test_strange_content_is_refused_by_name(path, content):
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"credentials\.toml"):
        credentials.read_file(path)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://u:p@x", "http://x?y", "http://x\ny", "http://x:99999"]
)
def test_unusable_urls_are_refused(path, url):
    with pytest.raises(ConfigurationError, match="AENV_API_URL"):
        found(path, AENV_API_URL=url)


@pytest.mark.parametrize("key", ["a b", "a\nb", "é", "x" * 5000])
def test_unusable_keys_are_refused_without_being_shown(path, key):
    with pytest.raises(ConfigurationError) as caught:
        found(path, AENV_API_KEY=key)
    assert key not in str(caught.value)
