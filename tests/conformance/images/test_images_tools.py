"""Images that other tools wrote, and ours read by them. Skipped where the tool is not installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.support.oci import BuiltImage, build_image, write_layout
from tests.support.registry import PASSWORD, USER, Registry

from agentenv.images.endpoints import HostSettings, RegistrySettings
from agentenv.images.places import open_source
from agentenv.images.reference import parse_reference
from agentenv.images.registry import RegistryClient
from agentenv.images.source import Image

IMAGE = build_image([{"a": b"1" * 5000}, {"d/": b"", "d/b": b"2"}], config={"Env": ["A=1"]})

Tool = Callable[..., None]


def tool(name: str) -> Tool:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")

    def run(*words: str) -> None:
        done = subprocess.run([name, *words], capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="replace")

    return run


@pytest.fixture
def skopeo() -> Tool:
    return tool("skopeo")


@pytest.fixture
async def client(registry_with_login: Registry) -> AsyncIterator[RegistryClient]:
    hosts = {registry_with_login.host: HostSettings(username=USER, password=PASSWORD)}
    made = RegistryClient(RegistrySettings(hosts))
    yield made
    await made.aclose()


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    write_layout(IMAGE, tmp_path / "layout", name="t")
    return tmp_path / "layout"


async def image_at(reference: str, client: RegistryClient) -> Image:
    source = open_source(parse_reference(reference), client)
    try:
        return await source.image()
    finally:
        await source.aclose()


def same(found: Image, image: BuiltImage) -> None:
    assert list(found.config.diff_ids) == image.diff_ids
    assert [layer.diff_id for layer in found.layers] == image.diff_ids
    assert found.config.env == ("A=1",)


@pytest.mark.parametrize("kind", ["oci", "v2s2"])
async def test_what_skopeo_pushes_is_read(
    skopeo: Tool, layout: Path, registry_with_login: Registry, client: RegistryClient, kind: str
) -> None:
    name = f"{registry_with_login.host}/skopeo/{kind}:1"
    login = ("--dest-tls-verify=false", "--dest-creds", f"{USER}:{PASSWORD}")
    skopeo("copy", "--insecure-policy", "--format", kind, *login, f"oci:{layout}:t", f"docker://{name}")
    same(await image_at(name, client), IMAGE)


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
async def test_what_skopeo_writes_is_read(
    skopeo: Tool, layout: Path, tmp_path: Path, client: RegistryClient, kind: str
) -> None:
    name = f"{kind}:{tmp_path}/written" + (":x/y:1" if kind == "docker-archive" else ":1")
    skopeo("copy", "--insecure-policy", f"oci:{layout}:t", name)
    same(await image_at(name, client), IMAGE)


async def test_what_umoci_writes_is_read(layout: Path, client: RegistryClient) -> None:
    umoci = tool("umoci")
    umoci("config", "--image", f"{layout}:t", "--tag", "u", "--config.user", "7:8")
    found = await image_at(f"oci:{layout}:u", client)
    same(found, IMAGE)
    assert found.config.user == "7:8"
