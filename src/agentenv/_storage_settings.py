"""Settings of storage: repository, block cache, images. Part of `config`, which builds and checks them.

Owns the sections [snapshot], [cache] and [images] and what must hold between their keys.
"""

# ruff: noqa: RUF009 - the calls in the dataclasses below are the declarations; they return dataclass fields.

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv._setting import declare, path_setting, seconds_setting, text_setting, whole_setting
from agentenv.errors import ConfigError

_DAY_S: Final = 86_400
COMPRESSIONS: Final = ("none", "lz4", "zstd")


@dataclass(frozen=True, slots=True)
class PosixFsConfig:
    """[snapshot.posix_fs]: a repository in a directory."""

    path: Path | None = path_setting(None, "Directory of the repository. Empty: state_dir/repository.")


@dataclass(frozen=True, slots=True)
class OssConfig:
    """[snapshot.oss]: a repository in an S3-compatible object store."""

    bucket: str = text_setting("", "Bucket; must exist. Needed with snapshot.backend oss.")
    region: str = text_setting("", "Region of the bucket; never guessed. Needed with snapshot.backend oss.")
    endpoint: str = text_setting("", "URL of a store that is not AWS, such as https://s3.example.net. Empty: AWS.")
    addressing: str = text_setting(
        "auto",
        "Bucket in the path or in the host name; auto: path with an endpoint, virtual without.",
        ("auto", "path", "virtual"),
    )
    prefix: str = text_setting("", "Put before every key, so that a bucket can hold more than one repository.")
    credentials_file: Path | None = path_setting(
        None, "File in the form of ~/.aws/credentials. Empty: environment, ~/.aws, then the machine's own identity."
    )
    profile: str = text_setting("", "Section of the credentials file. Empty: AWS_PROFILE, else `default`.")


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """[snapshot]: where committed snapshots live, and in which form."""

    backend: str = text_setting("posix_fs", "Kind of repository.", ("posix_fs", "oss"))
    posix_fs: PosixFsConfig = dataclasses.field(default_factory=PosixFsConfig)
    oss: OssConfig = dataclasses.field(default_factory=OssConfig)
    compression: str = text_setting(
        "none", "ZFile compression of layers in the repository (none shares files and page cache).", COMPRESSIONS
    )
    encryption_key_file: Path | None = path_setting(
        None, "File with 64 hex digits: layers are stored encrypted (AES-256-GCM). Without the key they are lost."
    )
    gc_grace_s: float = seconds_setting(
        300.0,
        0.0,
        30 * _DAY_S,
        "Unreferenced layers younger than this stay in the repository. Unless given: 0 for a repository inside "
        "server.state_dir, which no other node shares.",
    )
    refresh_s: float = seconds_setting(5.0, 0.1, 3_600.0, "How often snapshots of other nodes are looked for.")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """[cache]: the node's copy of blocks of remote layers; may be deleted whole while the node is stopped."""

    dir: Path | None = path_setting(None, "Folder of the block cache. Empty: state_dir/cache/blocks.")
    size_bytes_max: int = whole_setting(
        20 << 30, 64 << 20, 1 << 50, "Most bytes of cached blocks; the least recently used go first."
    )
    memory_outage_s: int = whole_setting(
        600, 1, _DAY_S, "How long a page of memory waits for a store that is away; then the sandbox ends. Disks: 60."
    )
    fill_bytes_per_s_max: int = whole_setting(
        32 << 20, 0, 1 << 40, "Rate at which the rest of a started sandbox's layers is fetched; 0: only what is read."
    )


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    """[images]: where OCI images are pulled from."""

    auth_file: Path | None = path_setting(
        None, "Registry credentials in the form of ~/.docker/config.json. Empty: that file of the server's user."
    )
    mirrors: tuple[str, ...] = declare(
        (), "Registries to try first, each `registry=https://mirror[/prefix]`, in this order.", kind="list"
    )
    insecure: tuple[str, ...] = declare(
        (), "Registries (host[:port]) that may be reached by plain http; loopback always may.", kind="list"
    )
    layer_bytes_max: int = whole_setting(
        64 << 30, 1 << 20, 1 << 44, "Largest unpacked layer of an image; beyond it the conversion is refused."
    )


def check_storage(snapshot: SnapshotConfig, images: ImagesConfig) -> None:
    """Raises `ConfigError` naming the key that is missing or has a wrong shape."""
    oss = snapshot.oss
    if snapshot.backend == "oss":
        for key, value in (("bucket", oss.bucket), ("region", oss.region)):
            if not value:
                raise ConfigError(f"snapshot.oss.{key}: must be given with snapshot.backend oss")
    if oss.endpoint and not re.fullmatch(r"https?://[^/?#]+(/[^?#]*)?", oss.endpoint):
        raise ConfigError(f"snapshot.oss.endpoint: {oss.endpoint!r} is not an http or https URL")
    if oss.prefix.startswith("/") or ".." in oss.prefix.split("/"):
        raise ConfigError(f"snapshot.oss.prefix: {oss.prefix!r} is not a relative key")
    for mirror in images.mirrors:
        if not re.fullmatch(r"[^=\s]+=https?://[^\s]+", mirror):
            raise ConfigError(f"images.mirrors: {mirror!r} is not `registry=URL`")
