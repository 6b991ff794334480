"""Kernel images, package choice and the cache, without a network and without a real kernel."""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
from pathlib import Path

import pytest
from test_guest_modules import module

from agentenv.errors import HostUnsuitable, ImageError
from agentenv.guest import kernel as kernel_module
from agentenv.guest.kernel import extract_elf, fetch_kernel, has_pvh_entry, kernel_release, prepare_guest


def kernel_elf(note: int = 18) -> bytes:
    """An ELF with one note segment; note 18 of "Xen" is the PVH entry."""
    notes = struct.pack("<III", 4, 4, 1) + b"GNU\0" + b"abcd"
    notes += struct.pack("<III", 4, 8, note) + b"Xen\0" + struct.pack("<Q", 0x1000000)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, 0x1000000, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(notes), len(notes), 4)
    return header + segment + notes + b"Linux version 6.12.9-test (someone@somewhere) #1 SMP\n"


def bzimage(payload: bytes) -> bytes:
    """A boot sector and one setup sector, then the payload that the header points at."""
    image = bytearray(1024)
    image[0x1F1] = 1
    image[0x1FE:0x200] = b"\x55\xaa"
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 16, len(payload))
    return bytes(image) + bytes(16) + payload


def xz_payload(elf: bytes) -> bytes:
    return lzma.compress(elf) + struct.pack("<I", len(elf))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "modules/6.12.9-test"
    root.mkdir(parents=True)
    (root / "modules.builtin").write_text("")
    (root / "virtio_blk.ko").write_bytes(module(""))
    return root


def test_the_kernel_comes_out_of_a_bzimage_whole() -> None:
    elf = kernel_elf()
    assert extract_elf(bzimage(xz_payload(elf)), "k") == elf
    assert extract_elf(bzimage(gzip.compress(elf)), "k") == elf
    assert extract_elf(elf, "k") == elf
    assert kernel_release(elf, "k") == "6.12.9-test"


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "neither an ELF nor a bzImage"),
        (b"MZ" + bytes(2000), "neither an ELF nor a bzImage"),
        (bzimage(xz_payload(kernel_elf()))[:-40], "truncated"),
        (bzimage(b"\xfd7zXZ\0" + bytes(60)), "damaged"),
        (bzimage(b"LZO?" + bytes(60)), "unknown compression"),
        (bzimage(lzma.compress(kernel_elf()) + struct.pack("<I", 7)), "its header says 7"),
        (bzimage(lzma.compress(b"x") + struct.pack("<I", 1 << 31)), "the limit is"),
        (kernel_elf(note=17), "no x86-64 ELF with a PVH entry"),
    ],
)
def test_an_unusable_image_is_refused_with_the_reason(image: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        extract_elf(image, "vmlinuz-x")


def test_a_truncated_elf_has_no_pvh_entry_rather_than_a_crash() -> None:
    elf = kernel_elf()
    assert has_pvh_entry(elf)
    assert not any(has_pvh_entry(elf[:length]) for length in range(120))


def test_the_newest_cloud_kernel_is_preferred_and_signed_before_unsigned() -> None:
    names = [
        "linux-image-6.12.9+deb12-cloud-amd64",
        "linux-image-6.12.117+deb12-cloud-amd64-unsigned",
        "linux-image-6.12.117+deb12-cloud-amd64",
        "linux-image-6.12.118+deb12-amd64",
        "linux-image-6.12.118+deb12-cloud-amd64-dbg",
        "linux-image-6.1.200-cloud-amd64",
    ]
    assert kernel_module._candidates(names) == [names[2], names[1], names[0]]


def test_a_configured_kernel_is_prepared_once_and_its_version_follows_the_daemon(tree: Path, tmp_path: Path) -> None:
    image, envd = tmp_path / "vmlinuz", tmp_path / "envd"
    image.write_bytes(bzimage(xz_payload(kernel_elf())))
    envd.write_bytes(b"daemon 1")

    def prepare() -> kernel_module.GuestFiles:
        return prepare_guest(
            envd, tmp_path / "guest", tmp_path / "cache", kernel=image, modules_dir=tree, modules=["virtio_blk"]
        )

    first = prepare()
    assert first.version.startswith("6.12.9-test-")
    assert first.vmlinux.read_bytes() == kernel_elf()
    assert first.vmlinux.parent == tmp_path / "guest" / first.version
    assert b"virtio_blk.ko" in first.initramfs.read_bytes()
    (tree / "virtio_blk.ko").unlink()
    assert prepare() == first, "the second time nothing is read from the modules folder"
    envd.write_bytes(b"daemon 2")
    second = prepare()
    assert second.version != first.version
    assert first.initramfs.read_bytes() != second.initramfs.read_bytes()
    assert not [path.name for path in (tmp_path / "guest").rglob(".*")], "no partial file stays"


def test_a_missing_daemon_says_how_to_build_it(tree: Path, tmp_path: Path) -> None:
    image = tmp_path / "vmlinuz"
    image.write_bytes(kernel_elf())
    with pytest.raises(ImageError, match="cargo build"):
        prepare_guest(tmp_path / "none", tmp_path / "g", tmp_path / "c", kernel=image, modules_dir=tree, modules=[])


def test_half_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostUnsuitable, match="both"):
        prepare_guest(tmp_path / "envd", tmp_path, tmp_path, kernel=tmp_path / "k")
    with pytest.raises(HostUnsuitable, match="cannot be read"):
        prepare_guest(tmp_path / "envd", tmp_path, tmp_path, kernel=tmp_path / "k", modules_dir=tmp_path)


def test_without_any_package_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnsuitable, match="apt-get update"):
        fetch_kernel(tmp_path / "cache")


def test_without_apt_the_newest_cached_kernel_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for version in ("6.12.9+deb12", "6.12.100+deb12"):
        folder = tmp_path / kernel_module._key(f"linux-image-{version}-cloud-amd64", ["m"])
        folder.mkdir()
        (folder / "release").write_text(version)
    for refresh in (False, True):
        assert fetch_kernel(tmp_path, ["m"], refresh=refresh).release == "6.12.100+deb12"


def test_a_restart_asks_nobody_for_a_kernel_that_it_has_and_a_refresh_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def apt(command: list[str], *_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[0])
        return subprocess.CompletedProcess(command, 100, b"linux-image-6.12.9+deb12-cloud-amd64", b"")

    monkeypatch.setattr(kernel_module, "_run", apt)
    monkeypatch.setattr(kernel_module.shutil, "which", lambda _: "/usr/bin/apt-cache")
    folder = tmp_path / kernel_module._key("linux-image-6.12.8+deb12-cloud-amd64", ["m"])
    folder.mkdir()
    (folder / "release").write_text("6.12.8")
    assert fetch_kernel(tmp_path, ["m"]).release == "6.12.8"
    assert asked == []
    assert fetch_kernel(tmp_path, ["m"], refresh=True).release == "6.12.8", "the download failed"
    assert asked == ["apt-cache", "apt-get"]
