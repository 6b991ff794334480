"""One image in each place that images come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.oci import BuiltImage, write_docker_archive, write_layout, write_oci_archive
from tests.support.registry import PASSWORD, USER, Registry, running_registry

from agentenv.images.endpoints import HostSettings, RegistrySettings
from agentenv.images.places import open_source
from agentenv.images.reference import parse_reference
from agentenv.images.registry import RegistryClient
from agentenv.images.source import Source

PLACES = ["registry", "registry with login", "oci", "oci-archive", "docker-archive"]


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def registry_with_login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry-login"), login=True) as running:
        yield running


@dataclass
class Place:
    """Puts an image somewhere and names it there."""

    kind: str
    folder: Path
    client: RegistryClient
    registry: Callable[[], Registry]

    def reference(self, image: BuiltImage, name: str = "one") -> str:
        if self.kind.startswith("registry"):
            registry = self.registry()
            registry.push(image, f"some/{name}", "t")
            return f"{registry.host}/some/{name}:t"
        if self.kind == "oci":
            write_layout(image, self.folder / "layout", name="t")
            return f"oci:{self.folder}/layout:t"
        if self.kind == "oci-archive":
            write_oci_archive(image, self.folder / "a.tar", self.folder / "scratch", name="t")
            return f"oci-archive:{self.folder}/a.tar:t"
        write_docker_archive(image, self.folder / "d.tar", [f"some/{name}:t", "other:latest"])
        return f"docker-archive:{self.folder}/d.tar:some/{name}:t"

    def source(self, image: BuiltImage, name: str = "one") -> Source:
        return self.named(self.reference(image, name))

    def named(self, reference: str) -> Source:
        return open_source(parse_reference(reference), self.client)


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    fixture = "registry_with_login" if "login" in request.param else "registry"
    hosts = {}
    if "login" in request.param:
        hosts[request.getfixturevalue(fixture).host] = HostSettings(username=USER, password=PASSWORD)
    client = RegistryClient(RegistrySettings(hosts))
    yield Place(request.param, tmp_path, client, lambda: request.getfixturevalue(fixture))
    await client.aclose()
