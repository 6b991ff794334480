"""OCI images on real machines, by the command that a user types: from layouts, archives, registries and Dockerfiles."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench.node import RunningNode, aenv, clean, free_port, start_node, stop_server
from e2b import Sandbox
from e2b.connection_config import ApiParams

from agentenv.config import load
from tests.support.fault_proxy import Stall, proxy_in_thread
from tests.support.machine_images import (
    Entry,
    as_zfile,
    busybox_tree,
    layer,
    overlaybd_layers,
    push_overlaybd,
    static_busybox,
)
from tests.support.oci import BuiltImage, build_image, digest_of, write_layout
from tests.support.registry import Registry, running_registry
from tests.vm.conftest import host_leftovers

pytestmark = pytest.mark.vm

COMMAND_S_MAX = 120.0
GONE_S_MAX = 20.0
# Of the images on demand, a mebibyte each, which nothing reads before the test does.
DATA_FILES = 64
# No filling: only what is read is fetched.
SETTINGS = {
    "AENV_POOL_WARM_PER_TEMPLATE": "0",
    "AENV_SANDBOX_PAUSE_LINGER_S": "0",
    "AENV_CACHE_FILL_BYTES_PER_S_MAX": "0",
}
PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234::/srv:/bin/sh\n"
TWO_CONFIG = {
    "User": "app",
    "WorkingDir": "/srv",
    "Env": ["TWO=2"],
    "Entrypoint": ["/bin/sh"],
    "Labels": {"a": "b"},
}


@dataclass
class Place:
    """A node without any template, and layouts beside it. `running` changes when a test starts it again."""

    root: Path
    running: RunningNode

    @property
    def state_dir(self) -> Path:
        return self.running.state_dir

    @property
    def api(self) -> ApiParams:
        node = self.running
        return {"api_url": node.api_url, "sandbox_url": node.sandbox_url, "api_key": node.api_key}

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.running.environment()}

    def layout(self, name: str, image: BuiltImage) -> str:
        """The image as a reference to a layout of its own."""
        write_layout(image, self.root / name, name="v1")
        return f"oci:{self.root / name}:v1"

    def process(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*aenv(), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            env=self.environment,
        )

    def run(self, *words: str) -> str:
        """What `aenv WORDS...` printed; the test fails if it fails, or says anything else."""
        done = self.process(*words)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words))

    def staged(self) -> list[str]:
        """Work of images that is not over, in files and processes."""
        found = [str(path) for path in (self.state_dir / "staging" / "images").glob("*")]
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if entry.name.isdigit() and "/aenv-image " in line and str(self.state_dir) in line:
                    found.append(line)
        return found

    def wait_unstaged(self) -> None:
        until = time.monotonic() + GONE_S_MAX
        while found := self.staged():
            assert time.monotonic() < until, found
            time.sleep(0.05)

    def restart(self) -> None:
        stop_server(self.running)
        self.running = start_node(self.state_dir, free_port(), sys.stderr, ensure_base=False, **SETTINGS)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="aenv-images-", dir=os.environ.get("AENV_SCRATCH", "/var/tmp")))
    state = root / "state"
    try:
        place = Place(root, start_node(state, free_port(), sys.stderr, ensure_base=False, **SETTINGS))
        try:
            yield place
        finally:
            stop_server(place.running)
    finally:
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(state)}).run_dir
        clean(state, sys.stderr)
        shutil.rmtree(root, ignore_errors=True)
    assert host_leftovers(state, run_dir) == []


@pytest.fixture(autouse=True)
def _nothing_left(place: Place) -> Iterator[None]:
    yield
    for box in place.run("ls", "-q").split():
        place.run("kill", box)
    place.wait_unstaged()


@pytest.fixture(scope="module")
def registry(place: Place) -> Iterator[Registry]:
    with running_registry(place.root / "registry") as running:
        running.push(_plain(Env=["WHERE=a registry", "PATH=/bin"]), "group/busy", "1.0")
        yield running


@pytest.fixture(scope="module")
def two_layers(place: Place) -> str:
    """An image with a user of its own, and a file of its first layer that the second takes away."""
    first = [*busybox_tree(), Entry("tmp/gone", b"x"), Entry("tmp/kept", b"kept\n")]
    second = [
        *(Entry("etc"), Entry("etc/passwd", PASSWD, mode=0o644), Entry("srv", uid=1234)),
        *(Entry("srv/mine", b"the app's\n", mode=0o600, uid=1234), Entry("tmp/.wh.gone", b"")),
    ]
    return place.layout("two", build_image([layer(first), layer(second)], config=TWO_CONFIG))


def test_an_image_without_users_and_its_missing_workdir(place: Place) -> None:
    reference = place.layout("busy", _plain(WorkingDir="/app", Env=["GREETING=from the image", "PATH=/bin:/sbin"]))
    box = place.json("create", "--image", reference)
    said = place.run("exec", box["sandboxID"], "--", 'id -un; pwd; echo "$GREETING"; hostname; echo x > file; ls')
    assert said == f"user\n/app\nfrom the image\n{box['sandboxID']}\nfile\n"
    assert place.run("exec", box["sandboxID"], "-u", "root", "--", "id -u; pwd") == "0\n/app\n"
    sandbox = Sandbox.connect(box["sandboxID"], **place.api)
    sandbox.files.write("by-sdk", "from the SDK")
    assert sandbox.commands.run("cat by-sdk; stat -c %U by-sdk; echo $HOME").stdout == "from the SDKuser\n/home/user\n"
    assert sandbox.files.read("/home/user/../../app/by-sdk") == "from the SDK"
    before = time.monotonic()
    again = place.json("create", "--image", reference)
    assert again["templateID"] == box["templateID"]
    # A first boot alone takes longer.
    assert time.monotonic() - before < 3


def test_the_images_own_user_and_whiteouts(place: Place, two_layers: str) -> None:
    box = place.run("create", "--image", two_layers, "-q").strip()
    said = place.run("exec", box, "--", "id -un; id -u; pwd; echo $TWO; cat mine; ls /tmp")
    assert said == "app\n1234\n/srv\n2\nthe app's\nkept\n"
    sandbox = Sandbox.connect(box, **place.api)
    sandbox.files.write("new", "text")
    assert sandbox.commands.run("stat -c '%U %n' *").stdout == "app mine\napp new\n"
    # `user` is there as everywhere, for who asks for it.
    assert sandbox.commands.run("id -un; cd; pwd", user="user").stdout == "user\n/home/user\n"


def test_users_and_homes_that_images_leave_to_others(place: Place) -> None:
    tree = layer([*busybox_tree(), Entry("home", link="var/home")])
    numbered = build_image([tree], config={"User": "4242:7", "WorkingDir": "/home/x"})
    box = place.run("create", "--image", place.layout("numbered", numbered), "-q").strip()
    assert place.run("exec", box, "--", "id -u; pwd; stat -c %u .") == "4242\n/var/home/x\n4242\n"
    assert place.run("exec", box, "-u", "user", "--", "cd; pwd") == "/home/user\n"
    ghost = place.layout("ghost", build_image([tree], config={"User": "ghost"}))
    refused = place.process("create", "--image", ghost)
    assert (refused.returncode, "'ghost'" in refused.stderr) == (1, True)
    assert place.run("ls", "-q").split() == [box]


def test_an_image_that_is_one_program(place: Place) -> None:
    image = build_image([layer([Entry("busybox", static_busybox())])], config={"Entrypoint": ["/busybox"]})
    box = place.run("create", "--image", place.layout("alone", image), "-q").strip()
    assert place.run("exec", box, "--", "/busybox", "id", "-u") == "1000\n"
    shell = place.process("exec", box, "--", "echo a shell")
    assert (shell.returncode, "/bin/sh" in shell.stderr) == (127, True)
    sandbox = Sandbox.connect(box, **place.api)
    sandbox.files.write("file", b"\0\xff")
    assert bytes(sandbox.files.read("/home/user/file", format="bytes")) == b"\0\xff"
    assert {entry.name for entry in sandbox.files.list("/")} >= {"busybox", "etc", "home"}


def test_what_a_terminal_shows_and_ctrl_c(place: Place, two_layers: str) -> None:
    words = ("create", "--image", two_layers, "--disk-mib", "256")
    assert "first boot" in _on_terminal(place, *words, interrupt_at="first boot").shown
    place.wait_unstaged()
    assert place.json("ls") == []
    whole = _on_terminal(place, *words)
    assert (whole.code, "first boot" in whole.shown) == (0, True)
    ready = _on_terminal(place, *words)
    assert (ready.code, "first boot" in ready.shown, "fetching" in ready.shown) == (0, False, False)


def test_an_image_of_a_registry_by_its_name(place: Place, registry: Registry) -> None:
    # It is asked again for a while, as a registry that starts may be.
    command = [*aenv(), "create", "--image", f"127.0.0.1:{free_port()}/none"]
    with subprocess.Popen(command, env=place.environment, stderr=subprocess.PIPE, text=True) as unreachable:
        _check_named_images(place, registry)
        _, said = unreachable.communicate(timeout=60)
    assert (unreachable.returncode, "connection attempts failed" in said) == (1, True)


def _check_named_images(place: Place, registry: Registry) -> None:
    box = place.run("create", "--image", f"{registry.host}/group/busy:1.0", "-q").strip()
    assert place.run("exec", box, "--", "echo $WHERE") == "a registry\n"
    for wrong in ("group/none:1.0", "group/busy:2.0"):
        refused = place.process("create", "--image", f"{registry.host}/{wrong}")
        assert (refused.returncode, refused.stdout) == (3, "")
        assert refused.stderr.startswith("aenv: ")
        assert wrong.partition(":")[0] in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_cancelled_download_leaves_nothing(place: Place, registry: Registry) -> None:
    host, port = registry.host.split(":")
    with proxy_in_thread(host, int(port)) as proxy:
        command = [*aenv(), "image", "pull", f"127.0.0.1:{proxy.port}/group/busy:1.0", "--disk-mib", "384"]
        # Manifest and configuration come; the layer never does.
        proxy.fail(Stall(), when=lambda request: "/blobs/" in request.target and len(proxy.requests) > 3, times=-1)
        with subprocess.Popen(command, env=place.environment, stderr=subprocess.PIPE) as process:
            until = time.monotonic() + GONE_S_MAX
            while not place.staged():
                assert time.monotonic() < until, process.poll()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(COMMAND_S_MAX) == 130
        place.wait_unstaged()
    # The other name of the same image is not spoiled by that.
    pulled = place.json("image", "pull", f"{registry.host}/group/busy:1.0", "--disk-mib", "384")
    assert pulled["diskSizeMB"] == 384


def test_images_are_listed_removed_and_collected(place: Place, registry: Registry) -> None:
    reference = place.layout("removed", build_image([layer([*busybox_tree(), Entry("random", os.urandom(8 << 20))])]))
    pulled = place.json("image", "pull", reference, "--disk-mib", "512")
    listed = {image["digest"]: image for image in place.json("image", "ls")}
    assert listed[pulled["digest"]] == pulled
    assert (pulled["references"], pulled["diskSizeMB"]) == ([reference], 512)
    assert pulled["sizeBytes"] > 8 << 20
    assert pulled["digest"] in place.run("image", "ls", "-q").split()
    before = place.json("storage", "show")["repository"]["sizeBytes"]
    place.run("image", "rm", reference)
    assert pulled["digest"] not in place.run("image", "ls", "-q").split()
    place.run("storage", "gc", "--grace", "0")
    assert place.json("storage", "show")["repository"]["sizeBytes"] <= before - pulled["sizeBytes"]
    assert place.process("image", "rm", reference).returncode == 3


def test_a_snapshot_goes_out_as_an_image_and_comes_back(place: Place, two_layers: str) -> None:
    box = place.run("create", "--image", two_layers, "-q").strip()
    # Not synced: the file is in the guest's memory alone.
    place.run("exec", box, "--", "echo written > out; ln -s out link; mkdir dir; rm mine")
    snapshot = place.json("snapshot", "create", box, "--name", "for-export")["snapshotID"]
    archive = place.root / "f.tar"
    place.run("image", "export", snapshot, "-o", str(archive))
    if shutil.which("skopeo") is not None:
        read = subprocess.run(
            ["skopeo", "inspect", "--config", f"oci-archive:{archive}"], check=True, capture_output=True, timeout=60
        )
        config = json.loads(read.stdout)["config"]
        kept = {name: config[name] for name in TWO_CONFIG}
        assert kept == TWO_CONFIG
    back = place.run("create", "--image", f"oci-archive:{archive}", "-q").strip()
    said = place.run("exec", back, "--", "id -un; pwd; echo $TWO; cat link; ls; stat -c %U out; ls /tmp")
    assert said == "app\n/srv\n2\nwritten\ndir\nlink\nout\napp\nkept\n"
    assert place.run("exec", box, "--", "cat out") == "written\n"


@pytest.mark.parametrize("form", [(False,) * 3, (False, False, True), (True,) * 3], ids=["lsmt", "both", "zfile"])
def test_overlaybd_layers_are_read_on_demand(
    place: Place, registry: Registry, form: tuple[bool, ...], tmp_path: Path
) -> None:
    """Where a layer's form has checksums of its blocks; else it is fetched whole."""
    data = [Entry("data"), *(Entry(f"data/{number}", os.urandom(1 << 20)) for number in range(DATA_FILES))]
    passwd = [Entry("etc"), Entry("etc/passwd", PASSWD, mode=0o644), Entry("srv", uid=1234)]
    plain = overlaybd_layers([layer(busybox_tree()), layer(passwd), layer(data)], 1024, tmp_path)
    layers = [as_zfile(path, tmp_path) if checked else path for path, checked in zip(plain, form, strict=True)]
    config = {"User": "app", "WorkingDir": "/srv", "Env": ["ON=demand"]}
    repository = f"on-demand-{''.join('z' if checked else 'l' for checked in form)}"
    size_bytes = push_overlaybd(registry, repository, "1", layers, config)
    images, fetched = place.json("image", "ls"), _fetched_bytes(place)
    reference = f"{registry.host}/{repository}:1"
    box = place.run("create", "--image", reference, "-q").strip()
    assert (
        place.run("exec", box, "--", "id -un; pwd; echo $ON; ls /data | wc -l") == f"app\n/srv\ndemand\n{DATA_FILES}\n"
    )
    assert _fetched_bytes(place) - fetched < size_bytes / 8
    # Only what could not be verified block by block is kept here, and listed for it.
    new = [image for image in place.json("image", "ls") if image not in images]
    assert len(new) == (0 if all(form) else 1)
    names = {path: digest_of(path.read_bytes()).removeprefix("sha256:") for path in layers}
    kept = {names[path] for path, checked in zip(layers, form, strict=True) if not checked}
    assert _stored_layers(place) & set(names.values()) == kept
    place.run("kill", box)
    # The next server, and the daemons that it starts, know where the layers are.
    place.restart()
    box = place.run("create", "--image", reference, "-q").strip()
    expected = data[1 + DATA_FILES // 2].content
    read = Sandbox.connect(box, **place.api).files.read(f"/data/{DATA_FILES // 2}", format="bytes")
    assert bytes(read) == expected
    assert (_fetched_bytes(place) > 0) == any(form)


def test_a_template_of_a_dockerfiles_base(place: Place, registry: Registry, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"ARG V=9\nFROM {registry.host}/group/busy:$V AS base\nRUN ignored\n")
    built = place.json("template", "build", "mine", "--dockerfile", str(dockerfile), "--build-arg", "V=1.0")
    box = place.json("create", "mine")
    assert box["templateID"] == built["templateID"]
    assert place.run("exec", box["sandboxID"], "--", "echo $WHERE") == "a registry\n"
    dockerfile.write_text("FROM scratch\n")
    refused = place.process("template", "build", "none", "--dockerfile", str(dockerfile))
    assert (refused.returncode, "line 1: FROM scratch" in refused.stderr) == (1, True)


def _plain(**config: Any) -> BuiltImage:
    return build_image([layer(busybox_tree())], config=config)


def _stored_layers(place: Place) -> set[str]:
    return {path.stem for path in (place.state_dir / "repository" / "layers").glob("*")}


def _fetched_bytes(place: Place) -> int:
    """What blockd's cache got from registries since it began."""
    return int(place.json("storage", "show")["cache"]["counters"]["bytes_from_store"])


@dataclass(frozen=True)
class _Seen:
    code: int
    shown: str


def _on_terminal(place: Place, *words: str, interrupt_at: str | None = None) -> _Seen:
    """`aenv WORDS...` on a terminal to its end; ctrl-C is typed as soon as some text shows up."""
    near, far = pty.openpty()
    termios.tcsetwinsize(far, (30, 200))
    environment = {**place.environment, "TERM": "xterm"}
    process = subprocess.Popen(
        [*aenv(), *words], stdin=far, stdout=far, stderr=far, start_new_session=True, env=environment
    )
    os.close(far)
    shown, until = "", time.monotonic() + COMMAND_S_MAX
    try:
        while select.select([near], [], [], max(0.0, until - time.monotonic()))[0]:
            try:
                shown += os.read(near, 4096).decode(errors="replace")
            except OSError:
                # The other side is closed.
                break
            if interrupt_at is not None and interrupt_at in shown:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
        return _Seen(process.wait(max(0.1, until - time.monotonic())), shown)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(near)
