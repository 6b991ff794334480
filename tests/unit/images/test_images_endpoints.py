"""Where a registry is asked, with which credentials, and when without TLS."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.images._auth import parse_challenges
from agentenv.images._retry import RetryPolicy, retry_after_s
from agentenv.images.credentials import AuthFile, Credentials
from agentenv.images.endpoints import Endpoint, HostSettings, RegistrySettings, endpoints_of, store_entry
from agentenv.images.reference import RegistryReference, parse_reference


def places(name: str, hosts: dict[str, HostSettings] | None = None, auth_file: Path | None = None) -> list[Endpoint]:
    reference = parse_reference(name)
    assert isinstance(reference, RegistryReference)
    return endpoints_of(reference, RegistrySettings(hosts or {}, auth_file))


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("debian", "https://registry-1.docker.io"),
        ("ghcr.io/a/b", "https://ghcr.io"),
        ("ghcr.io:444/a/b", "https://ghcr.io:444"),
        ("localhost/a", "http://localhost"),
        ("localhost:5000/a", "http://localhost:5000"),
        ("127.9.0.1:5000/a", "http://127.9.0.1:5000"),
        ("[::1]:5000/a", "http://[::1]:5000"),
        ("10.0.0.1:5000/a", "https://10.0.0.1:5000"),
    ],
)
def test_only_loopback_is_spoken_to_without_tls(name: str, base: str) -> None:
    assert [place.base for place in places(name)] == [base]


def test_plain_http_is_for_hosts_that_are_configured_so() -> None:
    hosts = {"10.0.0.1:5000": HostSettings(insecure=True)}
    assert places("10.0.0.1:5000/a", hosts)[0].base == "http://10.0.0.1:5000"
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2.*insecure"):
        places("ghcr.io/a", {"ghcr.io": HostSettings(url="http://10.0.0.2")})
    hosts = {"ghcr.io": HostSettings(url="http://10.0.0.2"), "10.0.0.2": HostSettings(insecure=True)}
    assert places("ghcr.io/a", hosts)[0].base == "http://10.0.0.2"


def test_a_mirror_s_path_goes_before_the_repository() -> None:
    hosts = {"docker.io": HostSettings(mirrors=("https://m.test/v2/hub/", "other.test"))}
    urls = [place.url("library/debian", "manifests/12") for place in places("debian", hosts)]
    assert urls == [
        "https://m.test/v2/hub/library/debian/manifests/12",
        "https://other.test/v2/library/debian/manifests/12",
        "https://registry-1.docker.io/v2/library/debian/manifests/12",
    ]


@pytest.mark.parametrize("url", ["ftp://x.test", "https://", "https://u:p@x.test", "https://x.test?y", "x.test:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="registries"):
        places("debian", {"docker.io": HostSettings(mirrors=(url,))})


def auth_file(folder: Path, auths: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": auths}))
    return path


def basic(text: str) -> dict[str, str]:
    return {"auth": base64.b64encode(text.encode()).decode()}


def test_the_longest_entry_of_a_login_file_counts(tmp_path: Path) -> None:
    auths = {"https://index.docker.io/v1/": basic("hub:1"), "g.test": basic("a:p:w"), "g.test/own/x": basic("b:2")}
    path = auth_file(tmp_path, auths)
    assert places("debian", None, path)[0].credentials == Credentials("hub", "1")
    assert places("g.test/own/y", None, path)[0].credentials == Credentials("a", "p:w")
    assert places("g.test/own/x/z", None, path)[0].credentials == Credentials("b", "2")
    assert places("other.test/x", None, path)[0].credentials is None


def test_explicit_credentials_come_first(tmp_path: Path) -> None:
    path = auth_file(tmp_path, {"g.test": basic("a:1")})
    hosts = {"g.test": HostSettings(username="b", password="2")}
    assert places("g.test/x", hosts, path)[0].credentials == Credentials("b", "2")
    reference = RegistryReference("g.test", "x", "t")
    assert store_entry(reference, RegistrySettings(hosts)) == {
        "url": "https://g.test",
        "username": "b",
        "password": "2",
    }


def test_tokens_and_helpers_in_a_login_file(tmp_path: Path) -> None:
    path = auth_file(tmp_path, {"a.test": {"identitytoken": "t"}, "b.test": {}})
    assert AuthFile(path).find("a.test", "x") == Credentials("", "", "t")
    assert AuthFile(path).find("b.test", "x") is None
    assert AuthFile(tmp_path / "nobody").find("a.test", "x") is None


@pytest.mark.parametrize("auths", [{"g.test": {"auth": "%"}}, {"g.test": 5}])
def test_a_damaged_login_file_is_named(tmp_path: Path, auths: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: auths\.g\.test"):
        AuthFile(auth_file(tmp_path, auths)).find("g.test", "x")


def test_secrets_are_not_in_a_repr() -> None:
    shown = repr((Credentials("u", "geheim", "geheim"), HostSettings(password="geheim")))
    assert "geheim" not in shown


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('Basic realm="r"', [("basic", {"realm": "r"})]),
        ('Bearer realm="https://a/t",service="s",scope="repository:a/b:pull,push"',
         [("bearer", {"realm": "https://a/t", "service": "s", "scope": "repository:a/b:pull,push"})]),
        ('Basic realm="a, b", Bearer realm=x', [("basic", {"realm": "a, b"}), ("bearer", {"realm": "x"})]),
        ('Bearer realm="a\\"b"', [("bearer", {"realm": 'a"b'})]),
        ("Negotiate", [("negotiate", {})]),
        ("Negotiate, Basic realm=x", [("negotiate", {}), ("basic", {"realm": "x"})]),
        ("", []),
        ("=,=", []),
    ],
)  # fmt: skip
def test_challenges_are_taken_apart(header: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert [(found.scheme, dict(found.parameters)) for found in parse_challenges([header])] == expected


def test_waits_double_up_to_a_limit_and_obey_the_server() -> None:
    policy = RetryPolicy(first_delay_s=1, delay_s_max=10)
    assert [policy.delay_s(failures, None) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert policy.delay_s(1, 33.0) == 33.0
    assert policy.delay_s(5, 0.0) == 1
    assert policy.delay_s(10_000, None) == 10


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("12", 0.0) == 12.0
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 20.0) == 40.0
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 90.0) == 0.0
    assert retry_after_s("soon", 0.0) is None
    assert retry_after_s(None, 0.0) is None
