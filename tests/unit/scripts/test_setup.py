"""scripts/setup.sh by its functions: what it says on hosts that lack something. Nothing is installed or built."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "scripts" / "setup.sh"


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Source the set-up and run `script`, which may replace commands by functions."""
    return subprocess.run(
        ["bash", "-c", f"source {SETUP}\n{script}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )


ROOT_ON_LINUX = (
    'id() { echo 0; }; uname() { case "$1" in -s) echo Linux;; -m) echo x86_64;; -r) echo "$KERNEL";; esac; }; '
)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "uname() { [ $1 = -s ] && echo Darwin || echo arm64; }; check_host",
            "this is Darwin on arm64; a node needs Linux",
        ),
        ("id() { echo 1000; }; command() { false; }; check_host", "become root first (`su -`)"),
        ("id() { echo 1000; }; command() { true; }; check_host", "with `sudo make ...`"),
        (f"KERNEL=6.1.0-30-amd64; {ROOT_ON_LINUX} check_host", "the kernel is 6.1.0; 6.8 or newer is needed"),
        ("check_device /tmp/aenv-none none 240 0", "/tmp/aenv-none cannot be opened; load the module `none`"),
        ("df() { echo Avail; echo 1073741824; }; check_space /var/lib/none 'a node' STATE", "/var/lib has 1 GiB free"),
        (
            "is_debian() { false; }; missing_packages() { echo zstd; echo gcc; echo zstd; }; install_packages",
            "what these Debian packages hold is missing: gcc zstd",
        ),
    ],
)
def test_an_unsuitable_host_is_told_what_helps(script: str, sentence: str) -> None:
    done = run(f"mknod() {{ false; }}; modprobe() {{ false; }}; {script}")
    assert done.returncode == 1, done.stdout
    assert sentence in done.stderr


def test_kernels_between_the_limits_get_a_warning() -> None:
    old, new = (run(f"KERNEL={kernel}; {ROOT_ON_LINUX} check_host") for kernel in ("6.8.12-x", "6.10.3"))
    assert "warning: the kernel is 6.8.12" in old.stdout
    assert (old.returncode, new.returncode, new.stdout) == (0, 0, "")


def test_only_missing_packages_are_installed() -> None:
    script = 'command() { case "$2" in nft|gcc) return 1;; esac; }; is_debian() { true; }; log=/dev/null; '
    script += 'apt_install() { echo "$@" >&3; }; install_packages 3>&1'
    done = run(script)
    assert done.stdout.splitlines() == ["setup: installing Debian packages: gcc nftables ", "gcc nftables"]


def test_versions_are_compared_as_versions() -> None:
    assert (
        run("at_least 1.95.0 1.85 && at_least 1.85 1.85 && ! at_least 1.9 1.85 && ! at_least '' 1.85").returncode == 0
    )


def test_set_up_asks_for_the_rust_of_the_workspace() -> None:
    workspace = tomllib.loads((SETUP.parents[1] / "Cargo.toml").read_text())["workspace"]
    assert run("echo $RUST_MIN").stdout.strip() == workspace["package"]["rust-version"]


def test_checkouts_have_different_folders_for_programs(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    copy = tmp_path / "scripts" / "setup.sh"
    copy.write_bytes(SETUP.read_bytes())
    environment = {key: value for key, value in os.environ.items() if key != "AENV_BIN_DIR"}
    printed = [
        subprocess.run(
            ["bash", path, "--print-bin-dir"], check=True, capture_output=True, text=True, env=environment
        ).stdout
        for path in (SETUP, SETUP, copy)
    ]
    assert printed[0] == printed[1] != printed[2]


def test_a_program_is_replaced_by_rename_and_only_when_it_changed(tmp_path: Path) -> None:
    """A running daemon keeps its file; a second set-up touches nothing."""
    source, bin_dir = tmp_path / "program", tmp_path / "bin"
    source.write_text("one")
    source.chmod(0o755)
    bin_dir.mkdir()
    script = f"bin_dir={bin_dir}; install_binary {source}"
    assert run(script).returncode == 0
    first = (bin_dir / "program").stat().st_ino
    assert run(script).returncode == 0
    assert (bin_dir / "program").stat().st_ino == first
    source.write_text("two, longer")
    with (bin_dir / "program").open() as held:
        assert run(script).returncode == 0
        assert held.read() == "one"
    assert (bin_dir / "program").read_text() == "two, longer"
    assert sorted(path.name for path in bin_dir.iterdir()) == [".program.source", "program"]
