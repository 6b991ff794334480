"""An S3 server on loopback for tests, as a process of its own, with one bucket that is new for every user.

Two kinds. `s3_server` is moto's, which comes with the Python packages. `fast_s3_server` is versitygw where the machine
has Go to build it (once, into the cache), and moto's elsewhere: moto copies a whole object for every range of it,
190 ms for one of 300 MB against 2 ms, so nothing that is timed can use it.

Why moto (checked with 5.2.5 on 2026-11-29): it comes by `uv sync` alone and does what the repository relies on:
`If-None-Match: *` and `If-Match` on PUT (412), listings in pages, multipart uploads, ETags. It keeps objects in memory,
checks no signatures unless told to, and compares and stores under Python's own lock only: 800 racing creations had one
winner each, which is not a proof.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_S_MAX = 30.0
STOP_S_MAX = 5.0
BUILD_S_MAX = 600.0
VERSITYGW = "v1.8.0"
REGION = "eu-west-3"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server."""

    host: str
    port: int
    # "moto" or "versitygw".
    kind: str = "moto"
    # The folder whose folders are the buckets; None where buckets are made by a request.
    folder: Path | None = None
    access_key_id: str = "test"
    secret_access_key: str = field(default="test-secret", repr=False)

    @property
    def endpoint(self) -> str:
        """Without a bucket: use path addressing."""
        return f"http://{self.host}:{self.port}"

    def make_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"b{uuid.uuid4().hex}"
        if self.folder is not None:
            (self.folder / name).mkdir()
            return name
        connection = http.client.HTTPConnection(self.host, self.port, timeout=START_S_MAX)
        try:
            place = f"<LocationConstraint>{REGION}</LocationConstraint>"
            body = f"<CreateBucketConfiguration>{place}</CreateBucketConfiguration>"
            # The region is in the signature's scope; nobody checks the rest.
            scope = f"{self.access_key_id}/20260101/{REGION}/s3/aws4_request"
            signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
            connection.request("PUT", f"/{name}", body, {"Authorization": signed})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
        finally:
            connection.close()
        return name


@contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    """Start a server, wait until it answers, and end it. What it says goes to `log`."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_until_it_answers(process, port, log)
        yield S3Server("127.0.0.1", port)
    finally:
        _end(process)


@contextmanager
def fast_s3_server(folder: Path) -> Iterator[S3Server]:
    """As `s3_server`, with everything (objects too) in `folder`, which exists."""
    program = versitygw()
    if program is None:
        with s3_server(folder / "s3.log") as server:
            yield server
        return
    objects, port = folder / "objects", _free_port()
    objects.mkdir()
    server = S3Server("127.0.0.1", port, "versitygw", objects)
    command = [str(program), "--access", server.access_key_id, "--secret", server.secret_access_key]
    command += ["--port", f"127.0.0.1:{port}", "--region", REGION, "--quiet", "posix", str(objects)]
    log = folder / "s3.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_until_it_answers(process, port, log)
        yield server
    finally:
        _end(process)


def versitygw() -> Path | None:
    """The program, built at the first call; None without Go, or where it cannot be built."""
    tools = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aenv" / "tools" / VERSITYGW
    program = tools / "versitygw"
    if program.exists():
        return program
    if shutil.which("go") is None:
        return None
    # Everything that a build leaves lies in one folder, which goes when the program is there.
    with tempfile.TemporaryDirectory(prefix="versitygw-") as scratch:
        places = {"GOPATH": scratch, "GOCACHE": f"{scratch}/cache", "GOBIN": f"{scratch}/bin", "GOFLAGS": "-modcacherw"}
        command = ["go", "install", f"github.com/versity/versitygw/cmd/versitygw@{VERSITYGW}"]
        try:
            subprocess.run(command, env={**os.environ, **places}, check=True, capture_output=True, timeout=BUILD_S_MAX)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError):
            return None
        tools.mkdir(parents=True, exist_ok=True)
        partial = tools / f"versitygw.{os.getpid()}"
        shutil.copy2(f"{scratch}/bin/versitygw", partial)
        partial.rename(program)
    return program


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_S_MAX
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"the S3 server does not answer: {log.read_text(errors='replace')[-2000:]}")
