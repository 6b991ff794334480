"""A real registry (Debian's docker-registry) on loopback for the length of a test, and pushing to it.

The program is the one in PATH, else the package's, downloaded and unpacked into the cache: installing the package would
start a service on the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.support.oci import BuiltImage, digest_of

USER: Final = "user"
PASSWORD: Final = "open sesame"
# bcrypt of the password, the one kind of hash that the registry takes.
_HTPASSWD: Final = f"{USER}:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"
START_S_MAX: Final = 20.0
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class Registry:
    """A running registry, as `host:port`."""

    host: str
    login: tuple[str, str] | None

    def push(self, image: BuiltImage, repository: str, tag: str | None = None) -> None:
        """All blobs, then the manifest under its digest or the tag."""
        for content in image.blobs().values():
            self.push_blob(content, repository)
        self.push_manifest(image.manifest, image.manifest_type, repository, tag)

    def push_blob(self, content: bytes, repository: str) -> str:
        with self._client() as client:
            begun = client.post(f"/v2/{repository}/blobs/uploads/")
            begun.raise_for_status()
            location = httpx.URL(begun.headers["location"]).copy_merge_params({"digest": digest_of(content)})
            client.put(location, content=content).raise_for_status()
        return digest_of(content)

    def push_manifest(self, content: bytes, media_type: str, repository: str, tag: str | None = None) -> str:
        with self._client() as client:
            name = tag or digest_of(content)
            headers = {"content-type": media_type}
            client.put(f"/v2/{repository}/manifests/{name}", content=content, headers=headers).raise_for_status()
        return digest_of(content)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://{self.host}", auth=self.login, timeout=30, trust_env=False)


@contextlib.contextmanager
def running_registry(folder: Path, *, login: bool = False) -> Iterator[Registry]:
    """Start a registry with its files in `folder`; it is gone afterwards."""
    program = registry_program()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(_HTPASSWD)
    auth = f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n" if login else ""
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{auth}"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", config], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_for(process, port, folder / "log")
        yield Registry(f"127.0.0.1:{port}", (USER, PASSWORD) if login else None)
    finally:
        process.kill()
        process.wait(timeout=10)


def registry_program() -> str:
    """The program's path; the test is skipped where there is none and none can be had."""
    if (found := shutil.which("docker-registry")) is not None:
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "aenv" / "docker-registry"
    program = cache / "usr" / "bin" / "docker-registry"
    if not program.exists():
        _unpack_package(cache)
    if not program.exists():
        pytest.skip("docker-registry is neither installed nor to be downloaded: apt-get update")
    return str(program)


def _unpack_package(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "docker-registry"]
    done = subprocess.run(command, cwd=cache, capture_output=True, timeout=300, check=False)
    for archive in cache.glob("docker-registry_*.deb") if done.returncode == 0 else ():
        subprocess.run(["dpkg-deb", "-x", str(archive), str(cache)], check=True, timeout=120)
        archive.unlink()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_S_MAX
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(_POLL_S)
    pytest.fail(f"docker-registry did not start: {log.read_text(errors='replace')[-500:]}")
