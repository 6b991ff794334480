"""An app on a fake node, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from api_case import KEY
from starlette.applications import Starlette

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.api.fake import FakeImages, FakeStorage
from agentenv.clock import FakeClock
from agentenv.node.fake import FakeNode


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def node(clock: FakeClock) -> FakeNode:
    return FakeNode(clock)


@pytest.fixture
def images(node: FakeNode) -> FakeImages:
    return FakeImages(node.add_template)


@pytest.fixture
def storage() -> FakeStorage:
    return FakeStorage()


@pytest.fixture
def app(node: FakeNode, clock: FakeClock, images: FakeImages, storage: FakeStorage) -> Starlette:
    settings = ApiSettings(progress_interval_s=0.001)
    return create_app(node, ApiKeys([KEY]), settings, clock, images=images, storage=storage)


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers={"X-API-KEY": KEY}) as client:
        yield client
