"""`aenv cp` as a real process: files and directories both ways, odd names, hostile archives, failures one by one."""

from __future__ import annotations

import io
import os
import stat
import tarfile

import pytest

ODD_NAMES = ["a b", "é\u202e😀", "line\nbreak", "-dash", "quote'\"", "x" * 250, "c:d"]


@pytest.fixture
def guest(server):
    return server.state.root


@pytest.fixture
def box(server):
    return server.state.add()


def test_one_file_up_and_down(guest, box, aenv, tmp_path):
    data = os.urandom(700_000)
    (tmp_path / "a").write_bytes(data)
    assert aenv("cp", "./a", f"{box}:/b/c").returncode == 0
    assert (guest / "b" / "c").read_bytes() == data
    assert aenv("cp", f"{box}:/b/c", "./back").returncode == 0
    assert (tmp_path / "back").read_bytes() == data


def test_empty_file(guest, box, aenv, tmp_path):
    (tmp_path / "a").touch()
    assert aenv("cp", "a", f"{box}:/b").returncode == 0
    assert (guest / "b").read_bytes() == b""
    assert aenv("cp", f"{box}:/b", "back").returncode == 0
    assert (tmp_path / "back").read_bytes() == b""


def test_odd_names_survive(guest, box, aenv, tmp_path):
    for name in ODD_NAMES:
        (tmp_path / name).write_text(name)
    (guest / "d").mkdir()
    (tmp_path / "out").mkdir()
    assert aenv("cp", *(f"./{name}" for name in ODD_NAMES), f"{box}:/d").returncode == 0
    assert aenv("cp", *(f"{box}:/d/{name}" for name in ODD_NAMES), "out").returncode == 0
    for name in ODD_NAMES:
        assert (guest / "d" / name).read_text() == name
        assert (tmp_path / "out" / name).read_text() == name


def test_existing_directory_takes_the_file_in(guest, box, aenv, tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("y")
    (guest / "d").mkdir()
    (tmp_path / "out").mkdir()
    assert aenv("cp", "a", "b", f"{box}:/d").returncode == 0
    assert (guest / "d" / "b").read_text() == "y"
    assert aenv("cp", f"{box}:/d/a", f"{box}:/d/b", "out").returncode == 0
    assert (tmp_path / "out" / "a").read_text() == "x"


def test_relative_remote_path_is_below_the_home(guest, box, aenv, tmp_path):
    (tmp_path / "a").write_text("x")
    assert aenv("cp", "a", f"{box}:sub/a").returncode == 0
    assert aenv("cp", "a", f"{box}:").returncode == 0
    assert (guest / "home" / "sub" / "a").exists()
    assert (guest / "home" / "a").exists()


def test_permission_to_execute_is_kept_both_ways(guest, box, aenv, tmp_path):
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    assert aenv("cp", "run", f"{box}:/run").returncode == 0
    assert stat.S_IMODE((guest / "run").stat().st_mode) == 0o755
    assert aenv("cp", f"{box}:/run", "back").returncode == 0
    assert os.access(tmp_path / "back", os.X_OK)


def test_standard_streams(guest, box, aenv):
    data = bytes(range(256)) * 1000
    assert aenv("cp", "-", f"{box}:/b", stdin=data).returncode == 0
    assert (guest / "b").read_bytes() == data
    assert aenv("cp", f"{box}:/b", "-").stdout == data


def test_failures_are_reported_one_by_one_and_the_rest_is_copied(guest, box, aenv, tmp_path):
    (tmp_path / "good").write_text("x")
    (tmp_path / "dir").mkdir()
    (guest / "d").mkdir()
    done = aenv("cp", "nothing", "dir", "good", f"{box}:/d")
    assert (done.returncode, (guest / "d" / "good").read_text()) == (1, "x")
    assert done.stderr.decode().splitlines() == [
        "aenv: nothing: No such file or directory",
        "aenv: dir: is a directory (-r copies directories)",
    ]
    done = aenv("cp", f"{box}:/none", f"{box}:/d/good", ".")
    assert (done.returncode, (tmp_path / "good").read_text()) == (1, "x")
    assert done.stderr == f"aenv: {box}:/none: path '/none' does not exist\n".encode()


def test_upload_that_loses_bytes_is_an_error(server, box, aenv, tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    server.state.upload_loss_bytes = 3
    done = aenv("cp", "a", f"{box}:/b")
    assert (done.returncode, done.stderr) == (1, b"aenv: a: /b: 100 bytes sent, 97 bytes arrived\n")


def test_download_that_breaks_leaves_the_old_file(guest, box, aenv, tmp_path):
    (guest / "fault-short").write_text("x")
    (tmp_path / "fault-short").write_text("old")
    done = aenv("cp", f"{box}:/fault-short", ".")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert (tmp_path / "fault-short").read_text() == "old"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["fault-short", "guest"]


def make_tree(root):
    root.mkdir()
    for name in ODD_NAMES:
        (root / name).write_text(name)
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "empty").mkdir()
    (root / "sub" / "deep" / "big").write_bytes(os.urandom(500_000))
    (root / "sub" / "run").write_text("#!/bin/sh\n")
    (root / "sub" / "run").chmod(0o755)
    (root / "link").symlink_to("sub/deep/big")
    (root / "absolute").symlink_to("/etc/hostname")


def contents(root):
    """Everything below, as comparable values."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", None)
        else:
            found[name] = (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
    return found


def test_directory_up_and_down_with_tar(guest, box, aenv, tmp_path):
    make_tree(tmp_path / "tree")
    done = aenv("cp", "-r", "tree", f"{box}:/srv")
    assert (done.returncode, done.stderr) == (0, b"")
    assert contents(guest / "srv") == contents(tmp_path / "tree")
    done = aenv("cp", "-r", f"{box}:/srv", "back")
    assert (done.returncode, done.stderr) == (0, b"")
    assert contents(tmp_path / "back") == contents(tmp_path / "tree")


def test_directory_into_an_existing_one_and_content_with_dot(guest, box, aenv, tmp_path):
    make_tree(tmp_path / "tree")
    (guest / "srv").mkdir()
    assert aenv("cp", "-r", "tree", f"{box}:/srv").returncode == 0
    assert contents(guest / "srv" / "tree") == contents(tmp_path / "tree")
    assert aenv("cp", "-r", ".", f"{box}:/all", cwd=tmp_path / "tree").returncode == 0
    assert contents(guest / "all") == contents(tmp_path / "tree")
    (tmp_path / "out").mkdir()
    assert aenv("cp", "-r", f"{box}:/all", "out").returncode == 0
    assert contents(tmp_path / "out" / "all") == contents(tmp_path / "tree")


def test_directory_without_tar_goes_file_by_file_and_names_the_symlinks(server, guest, box, aenv, tmp_path):
    server.state.missing_programs = {"tar"}
    make_tree(tmp_path / "tree")
    expected = {name: value for name, value in contents(tmp_path / "tree").items() if value[0] != "link"}
    done = aenv("cp", "-r", "tree", f"{box}:/srv")
    assert done.returncode == 1
    assert sorted(done.stderr.decode().splitlines()) == [
        "aenv: tree/absolute: is not a regular file; left out, because the sandbox has no tar",
        "aenv: tree/link: is not a regular file; left out, because the sandbox has no tar",
    ]
    assert contents(guest / "srv") == expected
    done = aenv("cp", "-r", f"{box}:/srv", "back")
    assert (done.returncode, done.stderr) == (0, b"")
    assert contents(tmp_path / "back") == expected


def test_special_files_are_reported_and_left_out(guest, box, aenv, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("x")
    os.mkfifo(tmp_path / "tree" / "pipe")
    done = aenv("cp", "-r", "tree", f"{box}:/srv")
    assert (done.returncode, (guest / "srv" / "a").read_text()) == (1, "x")
    assert done.stderr == b"aenv: tree/pipe: is neither a file, a directory nor a symlink; left out\n"


def test_file_in_the_way_of_a_directory(guest, box, aenv, tmp_path):
    (tmp_path / "tree").mkdir()
    (guest / "srv").write_text("file")
    done = aenv("cp", "-r", "tree", f"{box}:/srv")
    assert (done.returncode, done.stderr) == (1, b"aenv: tree: a file is in the way\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "b"),
        ("i1:/a", "i2:/b"),
        ("a", "i1:/a", "i2:/b"),
        ("a",),
        ("-", "a", "i1:/b"),
        ("i1:/a", "i1:/b", "-"),
    ],
)
def test_impossible_pairs_are_usage_errors(aenv, arguments):
    done = aenv("cp", *arguments)
    assert (done.returncode, done.stderr[:6], done.stderr.count(b"\n")) == (2, b"aenv: ", 1)


def archive(*members):
    """A tar file of (TarInfo fields, content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for fields, content in members:
            info = tarfile.TarInfo(fields.pop("name"))
            for name, value in fields.items():
                setattr(info, name, value)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def hostile_download(server, guest, box, aenv, tmp_path):
    """Download a directory whose tar says what the test wants."""

    def run(data: bytes):
        (tmp_path / "archive").write_bytes(data)
        (guest / "bin").mkdir(exist_ok=True)
        fake = guest / "bin" / "tar"
        fake.write_text(f'#!/bin/sh\n[ "$1" = --help ] || exec cat {tmp_path}/archive\n')
        fake.chmod(0o755)
        server.state.programs["tar"] = str(fake)
        (guest / "srv").mkdir(exist_ok=True)
        return aenv("cp", "-r", f"{box}:/srv", "out")

    return run


def test_archive_cannot_write_outside(hostile_download, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("old")
    link = {"type": tarfile.SYMTYPE}
    done = hostile_download(
        archive(
            ({"name": "../secret"}, b"new"),
            ({"name": str(secret)}, b"new"),
            ({"name": "up", "linkname": "..", **link}, b""),
            ({"name": "up/secret"}, b"new"),
            ({"name": "direct", "linkname": "../secret", **link}, b""),
            ({"name": "direct"}, b"new"),
            ({"name": "hard", "type": tarfile.LNKTYPE, "linkname": "../secret"}, b""),
            ({"name": "hard2", "type": tarfile.LNKTYPE, "linkname": "up/secret"}, b""),
            ({"name": "device", "type": tarfile.CHRTYPE}, b""),
            ({"name": "good", "mode": 0o7777}, b"good"),
        )
    )
    assert done.returncode == 1
    assert secret.read_text() == "old"
    assert (tmp_path / "out" / "good").read_text() == "good"
    assert stat.S_IMODE((tmp_path / "out" / "good").stat().st_mode) == 0o777
    # Replaced, not written through.
    assert (tmp_path / "out" / "direct").read_text() == "new"
    assert len(done.stderr.splitlines()) == 6


@pytest.mark.parametrize("damage", ["cut", "no end mark", "middle", "garbage after the end"])
def test_damaged_archive_is_an_error(hostile_download, damage):
    data = archive(({"name": "a"}, b"x" * 2000), ({"name": "b"}, b"y"))
    if damage == "cut":
        data = data[:1000]
    elif damage == "no end mark":
        data = data[:3584]
    elif damage == "middle":
        data = data[:2560] + b"!" * 512 + data[3072:]
    else:
        data += b"!" * 512
    done = hostile_download(data)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"archive from the sandbox" in done.stderr


def test_long_and_binary_names_of_both_tar_formats(hostile_download, tmp_path):
    name = "d/" + "n" * 200 + "/" + "é" * 100
    done = hostile_download(
        archive(({"name": name}, b"x"), ({"name": "l", "type": tarfile.SYMTYPE, "linkname": name}, b""))
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out" / "l").read_text() == "x"
