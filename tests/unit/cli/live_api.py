"""The real API on a fake node with fake images and storage, on a port of the loopback and a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.api.fake import FakeImages, FakeStorage
from agentenv.clock import FakeClock
from agentenv.node.fake import FakeNode

API_KEY = "e2b_" + "cd" * 20
STOP_S_MAX = 10.0


class LiveApi:
    """Serves until `close`. Tests change the fakes before they start what calls them."""

    def __init__(self) -> None:
        self.node = FakeNode(FakeClock())
        self.images = FakeImages(self.node.add_template)
        self.storage = FakeStorage()
        settings = ApiSettings(progress_interval_s=0.01)
        app = create_app(
            self.node, ApiKeys([API_KEY]), settings, self.node.clock, images=self.images, storage=self.storage
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._listener])))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(STOP_S_MAX)
        self._listener.close()
        assert not self._thread.is_alive()
