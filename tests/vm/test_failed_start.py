"""A server whose start fails leaves nothing running on the host, whatever it had begun by then."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.node import NodeFailed, clean, free_port, start_node, stop_server

from agentenv.config import load
from tests.support.fault_proxy import SLOW_DOWN, FaultProxy, Status, proxy_in_thread
from tests.support.s3 import REGION, s3_server
from tests.vm.conftest import host_leftovers

pytestmark = pytest.mark.vm


class Place:
    """A state directory and a bucket behind a proxy. `start` begins a server and tells what it said at its end."""

    def __init__(self, root: Path, proxy: FaultProxy, settings: dict[str, str]) -> None:
        self.state = root / "state"
        self.run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(self.state)}).run_dir
        self.proxy = proxy
        self.settings = settings
        self._log = root / "log"

    def start(self, port: int | None = None) -> None:
        with self._log.open("a") as log:
            node = start_node(self.state, port or free_port(), log, ensure_base=False, **self.settings)
        stop_server(node)

    def said(self) -> str:
        return self._log.read_text()

    def running(self) -> list[str]:
        """Processes and mounts. Network slots stay for the next server, as they do after an orderly end."""
        found = host_leftovers(self.state, self.run_dir)
        return [line for line in found if line.startswith("process ") or f" {self.state}/" in line]


@pytest.fixture
def place() -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="aenv-start-", dir="/var/tmp"))
    with s3_server(root / "s3.log") as server, proxy_in_thread(server.host, server.port) as proxy:
        settings = {
            "AENV_SNAPSHOT_BACKEND": "oss",
            "AENV_SNAPSHOT_OSS_BUCKET": server.make_bucket(),
            "AENV_SNAPSHOT_OSS_REGION": REGION,
            "AENV_SNAPSHOT_OSS_ENDPOINT": proxy.url,
            "AWS_ACCESS_KEY_ID": server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        }
        made = Place(root, proxy, settings)
        try:
            yield made
        finally:
            clean(made.state, sys.stderr)
            left = host_leftovers(made.state, made.run_dir)
            shutil.rmtree(root, ignore_errors=True)
    assert left == []


def test_the_store_is_out(place: Place) -> None:
    place.proxy.fail(SLOW_DOWN, times=-1)
    with pytest.raises(NodeFailed):
        place.start()
    assert "snapshot.oss.endpoint" in place.said()
    assert place.running() == []
    # What was begun is no hindrance for the next one.
    place.proxy.heal()
    place.start()
    assert place.running() == []


def test_the_store_fails_after_the_look_at_it(place: Place) -> None:
    place.proxy.fail(Status(403), when=lambda request: "prefix=snapshots" in request.target, times=-1)
    with pytest.raises(NodeFailed):
        place.start()
    assert "snapshots/" in place.said()
    # blockd ran by then.
    assert (place.state / "logs" / "blockd.log").exists()
    assert place.running() == []


def test_the_port_is_taken(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(NodeFailed):
        place.start(taken.getsockname()[1])
    assert (place.state / "logs" / "proxy.log").exists()
    assert place.running() == []
