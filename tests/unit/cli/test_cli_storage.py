"""Images and storage through the real API, over a real socket: what is asked for, shown, and left behind."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from tests.unit.cli.live_api import API_KEY, LiveApi

from agentenv.errors import ImageError, NotFound, StorageFull, StoreUnavailable
from agentenv.model import Damage, Dockerfile, ExportOptions, ImageReference, Progress, Resources, TierUnavailable

WAIT_S = 20


@pytest.fixture
def live():
    api = LiveApi()
    yield api
    api.close()


@pytest.fixture
def environ(live, tmp_path):
    """As in conftest, but pointing at the real API."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "TERM": "xterm",
        "AENV_API_URL": live.url,
        "AENV_API_KEY": API_KEY,
    }


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never became true"
        time.sleep(0.005)


def start(environ, cwd, *args):
    # A test runner that was started in the background ignores SIGINT, and its children would, too.
    command = (
        "import signal,sys; signal.signal(signal.SIGINT, signal.default_int_handler); from agentenv.cli import main"
    )
    return subprocess.Popen(
        [sys.executable, "-c", f"{command}; main()", *args],
        env=environ,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# create and template build


def test_create_from_an_image_builds_its_template_once(live, cli):
    first = cli("create", "--image", "python:3.12", "--disk-mib", "512", "--timeout", "60", "-m", "a=b")
    assert first.exit_code == 0, first.output
    again = cli("create", "--image", "python:3.12", "--disk-mib", "512")
    template = json.loads(first.stdout)["templateID"]
    assert json.loads(again.stdout)["templateID"] == template
    assert live.images.built[0] == (ImageReference("python:3.12"), None, Resources(1, 512, 512))
    spec = live.node.get(json.loads(first.stdout)["sandboxID"]).spec
    assert (spec.timeout_s, spec.metadata) == (60, {"a": "b"})
    assert first.stderr == ""


def test_create_whose_image_cannot_be_built_starts_nothing(live, cli):
    live.images.fail_next("build", NotFound("docker.io has no image python:0"))
    result = cli("create", "--image", "python:0")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "aenv: docker.io has no image python:0\n"
    assert live.node.list_sandboxes() == []


@pytest.mark.parametrize(
    "args",
    [
        ["create", "base", "--image", "a"],
        ["create", "--disk-mib", "100"],
        ["create", "--image", "a", "--disk-mib", "0"],
        ["template", "build", "t", "--image", "a", "--dockerfile", "-"],
        ["template", "build", "t", "--build-arg", "A=1"],
        ["template", "build", "t", "--dockerfile", "not-there"],
        ["image", "export", "base"],
        ["image", "export", "base", "-o", "no/such/directory.tar"],
        ["image", "export", "base", "-o", "x", "--compression", "lz4"],
        ["storage", "gc", "--grace", "-1"],
    ],
)
def test_wrong_usage_asks_nothing_of_the_server(live, cli, args):
    result = cli(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert live.images.calls == live.storage.calls == live.node.calls == []


def test_template_build_takes_images_and_dockerfiles(live, cli, tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("ARG V\nFROM python:3.12\n")
    made = cli(
        "template", "build", "one", "--image", "oci:/srv/x:tag", "--cpu", "2", "--memory", "256", "--disk", "300"
    )
    assert json.loads(made.stdout)["names"] == ["one"]
    made = cli("template", "build", "two", "--dockerfile", str(dockerfile), "--build-arg", "V=3", "--build-arg", "HOME")
    assert made.exit_code == 0, made.output
    cli("template", "build", "three", "--dockerfile", "-", input="FROM scratch\n")
    assert live.images.built == [
        (ImageReference("oci:/srv/x:tag"), "one", Resources(2, 256, 300)),
        (Dockerfile("ARG V\nFROM python:3.12\n", {"V": "3", "HOME": str(tmp_path)}), "two", Resources(1, 512, 8_192)),
        (Dockerfile("FROM scratch\n", {}), "three", Resources(1, 512, 8_192)),
    ]


@pytest.mark.parametrize(("content", "text"), [(b"\xff", "not UTF-8"), (b"#" * (512 * 1024 + 1), "larger than")])
def test_a_dockerfile_that_is_none_is_refused(live, cli, tmp_path, content, text):
    (tmp_path / "D").write_bytes(content)
    result = cli("template", "build", "t", "--dockerfile", str(tmp_path / "D"))
    assert (result.exit_code, text in result.stderr) == (2, True)
    assert live.images.calls == []


# Images


def test_images_are_pulled_listed_and_forgotten(live, cli, on_terminal):
    pulled = json.loads(cli("image", "pull", "python:3.12", "--disk-mib", "100").stdout)
    cli("image", "pull", "other")
    listed = json.loads(cli("image", "ls").stdout)
    assert listed[1] == pulled
    code, text = on_terminal("image", "ls")
    assert code == 0
    assert text.split("\n")[0].split() == ["DIGEST", "REFERENCES", "LAYERS", "SIZE", "DISK", "AGE"]
    digest = pulled["digest"].removeprefix("sha256:")
    row = next(line for line in text.split("\n") if digest[:12] in line)
    assert row.split()[:7] == [digest[:12], "python:3.12", "2", "3", "MiB", "100", "MiB"]
    assert cli("image", "ls", "-q").stdout.splitlines() == [item["digest"] for item in listed]
    assert cli("image", "rm", digest[:8], "other").exit_code == 0
    assert cli("image", "ls", "-q").stdout == ""


def test_rm_of_what_is_not_there_is_3_and_the_others_go(live, cli):
    cli("image", "pull", "a")
    result = cli("image", "rm", "nothing", "a", "ffff")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 2)
    assert cli("image", "ls", "-q").stdout == ""


def test_rm_by_a_beginning_of_several_is_refused(live, cli, monkeypatch):
    cli("image", "pull", "a")
    cli("image", "pull", "b")
    monkeypatch.setattr("agentenv.cli.image.PREFIX_DIGITS_MIN", 0)
    result = cli("image", "rm", "sha256:")
    assert (result.exit_code, "means 2 images" in result.stderr) == (1, True)
    assert len(cli("image", "ls", "-q").stdout.splitlines()) == 2


def archive():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("oci-layout")
        info.size = 300_000
        tar.addfile(info, io.BytesIO(bytes(300_000)))
    return buffer.getvalue()


def test_export_writes_the_whole_archive(live, cli, tmp_path):
    whole = archive()
    live.images.archive = [whole[:70_000], whole[70_000:]]
    target = tmp_path / "out.tar"
    target.write_text("old")
    result = cli("image", "export", "team/base:v1", "-o", str(target), "--compression", "zstd", "--reference", "mine:1")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"file": str(target), "sizeBytes": len(whole)}
    assert target.read_bytes() == whole
    assert live.images.exported == [("team/base:v1", ExportOptions("zstd", "mine:1"))]


def test_export_to_standard_output(live, aenv):
    live.images.archive = [archive()]
    result = aenv("image", "export", "base", "-o", "-")
    assert (result.returncode, result.stdout == archive(), result.stderr) == (0, True, b"")


def test_an_archive_is_not_written_to_a_terminal(live, on_terminal):
    code, text = on_terminal("image", "export", "base", "-o", "-")
    assert (code, "not for a terminal" in text) == (2, True)


@pytest.mark.parametrize("moment", ["before", "half way"])
def test_an_export_that_fails_leaves_the_old_file(live, cli, tmp_path, moment):
    target = tmp_path / "out.tar"
    target.write_text("old")
    if moment == "before":
        live.images.fail_next("export", NotFound("no such snapshot"))
    else:
        live.images.archive_failure = StorageFull("the disk is gone")
    result = cli("image", "export", "base", "-o", str(target))
    assert result.exit_code == (3 if moment == "before" else 1)
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.tar"]
    assert target.read_text() == "old"


# Interrupts and progress


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("build", ["create", "--image", "a"]),
        ("pull", ["image", "pull", "a"]),
        ("export", ["image", "export", "base", "-o", "out.tar"]),
        ("read", ["image", "export", "base", "-o", "out.tar"]),
        ("verify", ["storage", "verify"]),
    ],
)
def test_an_interrupt_ends_it_here_and_on_the_server(live, environ, tmp_path, method, args):
    fake = live.storage if method == "verify" else live.images
    fake.hold(method)
    process = start(environ, tmp_path, *args)
    wait_for(lambda: method in fake.calls)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, b"", b"\n")
    wait_for(lambda: fake.cancelled == [method])
    assert live.images.open_exports == 0
    assert list(tmp_path.iterdir()) == []


def test_a_person_who_waits_sees_the_step(live, on_terminal, monkeypatch, tmp_path, environ):
    live.images.steps = [Progress("layer 2 of 3 \x1b[31m", 5 << 20, 10 << 20)]
    live.images.fail_next("pull", ImageError("layer 2 is no tar"))
    # Impatient, so that the test need not wait.
    (tmp_path / "sitecustomize.py").write_text("import agentenv.cli.progress as p\np.PATIENCE_S = 0.0\n")
    environ["PYTHONPATH"] = str(tmp_path)
    code, text = on_terminal("image", "pull", "a")
    assert code == 1
    assert r"layer 2 of 3 \x1b[31m" in text
    assert "5 MiB of 10 MiB" in text
    assert text.rstrip().endswith("aenv: layer 2 is no tar")


# Storage


def test_storage_shows_the_three_tiers(live, cli, on_terminal):
    for args in (["storage"], ["storage", "show"], ["storage", "--json"]):
        shown = json.loads(cli(*args).stdout)
        assert shown["repository"]["sharedBytes"] == 1 << 30
    code, text = on_terminal("storage")
    assert code == 0
    lines = text.rstrip("\n").split("\n")
    assert lines[0].split() == ["TIER", "SIZE", "LIMIT", "FREE", "FILES", "SHARED", "GARBAGE", "LOCATION"]
    assert [line.split()[0] for line in lines[2:5]] == ["staging", "repository", "cache"]
    assert lines[3].split()[-1] == "s3://bucket/aenv"
    assert lines[-1] == "3 snapshots in oss, not encrypted at rest, 90 % of reads of remote blocks met the cache"


def test_a_repository_out_of_reach_is_told_beside_the_other_tiers(live, cli, on_terminal):
    out = TierUnavailable("s3://bucket/aenv", "the store\x1b does not answer")
    live.storage.report = dataclasses.replace(live.storage.report, repository=out)
    assert json.loads(cli("storage").stdout)["repository"]["unavailable"] == out.reason
    code, text = on_terminal("storage")
    assert code == 0
    lines = text.rstrip("\n").split("\n")
    assert lines[3].split() == ["repository", *"------", "s3://bucket/aenv"]
    assert lines[2].split()[:3] == ["staging", "5", "MiB"]
    assert lines[-1] == "the repository is unavailable: the store\\x1b does not answer"
    live.storage.fail_next("collect", StoreUnavailable("out"))
    assert cli("storage", "gc").exit_code != 0


def test_gc_takes_a_grace(live, cli, on_terminal):
    assert json.loads(cli("storage", "gc", "--grace", "0").stdout)["freedBytes"] == 4 << 20
    code, text = on_terminal("storage", "gc")
    assert (code, text) == (
        0,
        "removed 4 files, 4 MiB\nforgot 2 converted layers whose image was never finished\n"
        "left 1 files, 1 KiB, that are younger than 1 h\n",
    )
    assert live.storage.graces == [0, None]


DAMAGE = Damage("repository", "layers/ab.lsmt", "block 3\x1b differs", ("template base:default", "sandbox i1"))


def test_verify_is_1_when_something_is_damaged_and_names_what_needs_it(live, cli, on_terminal):
    assert cli("storage", "verify").exit_code == 0
    code, text = on_terminal("storage", "verify")
    assert (code, text) == (0, "read 51 files, 3 GiB\nnothing is damaged\n")
    live.storage.damages = [DAMAGE]
    result = cli("storage", "verify")
    assert (result.exit_code, json.loads(result.stdout)["damages"][0]["item"]) == (1, "layers/ab.lsmt")
    code, text = on_terminal("storage", "verify")
    assert code == 1
    assert text.split("\n")[:3] == [
        r"repository layers/ab.lsmt: block 3\x1b differs",
        "    needed by template base:default",
        "    needed by sandbox i1",
    ]


def test_repair_is_0_when_everything_is_whole_again(live, cli):
    live.storage.damages = [Damage("cache", "blocks/cd", "unreadable")]
    assert cli("storage", "repair").exit_code == 0
    live.storage.damages = [DAMAGE, Damage("cache", "blocks/cd", "unreadable")]
    result = cli("storage", "repair")
    assert result.exit_code == 1
    assert [item["repaired"] for item in json.loads(result.stdout)["damages"]] == [False, True]
