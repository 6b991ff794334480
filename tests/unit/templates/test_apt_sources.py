"""What is read from a host's apt configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable
from agentenv.templates.apt_sources import DEFAULT_MIRROR, Source, guest_sources, host_sources, host_suite


def _os_release(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "os-release"
    path.write_text(text)
    return path


def test_the_suite_is_the_hosts_debian(tmp_path: Path) -> None:
    assert host_suite(_os_release(tmp_path, 'ID=debian\nVERSION_CODENAME=trixie\nPRETTY_NAME="x"\n')) == "trixie"


@pytest.mark.parametrize("text", ['ID=ubuntu\nVERSION_CODENAME=noble\nPRETTY_NAME="Ubuntu 24"\n', ""])
def test_another_system_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(HostUnsuitable, match=r"Ubuntu 24|an unknown system"):
        host_suite(_os_release(tmp_path, text))


def _apt(tmp_path: Path, files: dict[str, str]) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_one_line_and_deb822_sources_are_read_and_strangers_left_out(tmp_path: Path) -> None:
    etc = _apt(
        tmp_path,
        {
            "sources.list": "# deb http://old/debian bookworm main\n"
            "deb [arch=amd64 trusted=no] https://mirror.local/debian/ bookworm main contrib # ours\n"
            "deb-src https://mirror.local/debian bookworm main\n",
            "sources.list.d/google.list": "deb https://packages.example/apt cloud-sdk-bookworm main\n",
            "sources.list.d/debian.sources": "Types: deb\nURIs: http://sec.local/debian-security\n"
            "Suites: bookworm-security\nComponents:\n main\nSigned-By:\n x\n\n"
            "Types: deb\nEnabled: no\nURIs: http://off.local/debian\nSuites: bookworm-updates\nComponents: main\n",
        },
    )
    assert host_sources("bookworm", etc) == [
        Source("https://mirror.local/debian", "bookworm"),
        Source("http://sec.local/debian-security", "bookworm-security"),
    ]


def test_one_mirror_for_each_suite_is_enough(tmp_path: Path) -> None:
    etc = _apt(tmp_path, {"sources.list": "".join(f"deb http://{x}/debian trixie main\n" for x in "ba")})
    assert host_sources("trixie", etc) == [Source("http://a/debian", "trixie")]


def test_a_host_without_debian_sources_gets_the_public_mirror(tmp_path: Path) -> None:
    sources = host_sources("trixie", tmp_path)
    assert [source.uri for source in sources if source.suite == "trixie"] == [DEFAULT_MIRROR]
    assert any(source.is_security for source in sources)


def test_guests_use_the_public_mirror() -> None:
    assert guest_sources("bookworm").splitlines()[0] == "deb http://deb.debian.org/debian bookworm main"
