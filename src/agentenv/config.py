"""Every setting of the server, declared once: its key, type, default, limits and help.

The declaration is the field of a frozen dataclass below, so the table (`SETTINGS`), the environment names, the
checks and the typed values cannot drift apart. Values come from, last wins: the default, the TOML file, the
environment (`AENV_` + the key in upper case with dots as underscores). An unknown key or a value out of range is a
`ConfigError` that names it; nothing is guessed and nothing else in the package reads the environment.

What is not here: settings of the command line client (`client/`), which must not import the server's.
"""

# ruff: noqa: RUF009 - the calls in the dataclasses below are the declarations; they return dataclass fields.

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agentenv._setting import (
    ENV_PREFIX,
    Setting,
    check,
    declare,
    from_text,
    from_toml,
    path_setting,
    seconds_setting,
    text_setting,
    whole_setting,
)
from agentenv._storage_settings import CacheConfig, ImagesConfig, SnapshotConfig, check_storage
from agentenv.errors import ConfigError

DEFAULT_PATH: Final = Path("/etc/aenv/config.toml")
FILE_BYTES_MAX: Final = 1 << 20
_RUN_ROOT: Final = "/run/aenv"
# sockaddr_un holds 107 bytes of path; the longest below RUN is "/vm/<21 character id>/console.log".
_RUN_DIR_CHARS_MAX: Final = 70
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """[server]: where the node listens and keeps its things."""

    listen: str = text_setting("127.0.0.1:8000", "Address and port of the node's only public listener (the proxy).")
    domain: str = text_setting(
        "",
        "Domain that clients are told, `{port}-{sandbox id}.{domain}`; may carry a port. Empty: localhost with the "
        "port of server.listen, so that such a host opens in a browser or curl on the same machine.",
    )
    state_dir: Path = path_setting("/var/lib/aenv", "Everything that must survive a reboot.")
    run_dir: Path | None = path_setting(
        None, "Sockets and process records. Empty: /run/aenv/<first 10 hex of sha256(real path of state_dir)>."
    )
    api_keys_file: Path | None = path_setting(
        None, "Accepted API keys, one a line. Empty: state_dir/api_keys, made at first start."
    )
    bin_dir: Path = path_setting("/usr/local/lib/aenv", "Folder of aenv-blockd, aenv-proxy, aenv-launch and aenv-envd.")


@dataclass(frozen=True, slots=True)
class VirtualizationConfig:
    """[virtualization]: how microVMs are run."""

    driver: str = text_setting("auto", "VMM; auto probes by starting a tiny guest.", ("auto", "firecracker", "qemu"))
    accelerator: str = text_setting("auto", "auto uses KVM only where a guest really boots.", ("auto", "kvm", "tcg"))


@dataclass(frozen=True, slots=True)
class GuestConfig:
    """[guest]: the kernel that guests boot."""

    kernel: Path | None = path_setting(None, "Uncompressed kernel (vmlinux). Empty: fetched from the distribution.")
    modules_dir: Path | None = path_setting(None, "Modules of guest.kernel. Empty: those of the fetched kernel.")


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """[sandbox]: defaults of a sandbox and how many a node takes."""

    timeout_s_default: int = whole_setting(
        300, 1, 365 * _DAY_S, "Time to live where the request names none (15 where E2B's v1 routes say so)."
    )
    timeout_s_max: int = whole_setting(30 * _DAY_S, 1, 365 * _DAY_S, "Longest time to live that a request may ask for.")
    on_timeout: str = text_setting("pause", "What expiry does where the request does not say.", ("pause", "kill"))
    pause_linger_s: float = seconds_setting(
        5.0, 0.0, 3_600.0, "How long a halted VM is kept after its pause is durable; a resume by it takes milliseconds."
    )
    fork_count_max: int = whole_setting(100, 1, 1_000, "Most children of one fork request.")
    live_count_max: int = whole_setting(1_000, 1, 100_000, "Most sandboxes that hold a VMM at the same time.")
    start_concurrency_max: int = whole_setting(8, 1, 256, "Starts and resumes that run at the same time.")
    start_queue_length_max: int = whole_setting(256, 0, 100_000, "Starts that may wait for their turn; beyond it: 429.")
    start_wait_s_max: float = seconds_setting(30.0, 0.1, 600.0, "Longest wait for a turn; beyond it: 429.")
    memory_reserve_mib: int = whole_setting(1_024, 0, 1 << 20, "Memory of the host that sandboxes may not take.")


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """[network]: addresses of the slots."""

    subnet: str = text_setting("10.12.0.0/16", "IPv4 range of slot addresses on the host, one per sandbox.")
    dns: tuple[str, ...] = declare(
        ("1.1.1.1", "8.8.8.8"),
        "IPv4 resolvers that guests are given (in the environment: comma-separated).",
        kind="list",
    )
    slot_pool_idle_min: int = whole_setting(
        8, 0, 1_000, "Slots kept ready, so that a start does not wait for a namespace."
    )


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """[pool]: restored clones that wait to become somebody's."""

    warm_per_template: int = whole_setting(2, 0, 1_000, "Held clones per hot template; 0 switches the pool off.")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """[limits]: bounds of the API itself."""

    body_bytes_max: int = whole_setting(1 << 20, 1 << 10, 64 << 20, "Largest request body of the API; beyond it: 413.")
    body_read_s_max: float = seconds_setting(
        30.0, 0.1, 600.0, "Longest time a client may take to send a body; beyond it: 408."
    )
    request_s_max: float = seconds_setting(120.0, 1.0, 3_600.0, "Time budget of one API request; beyond it: 504.")
    metadata_bytes_max: int = whole_setting(
        64 << 10, 0, 1 << 20, "Names and values of one sandbox's metadata, in UTF-8."
    )
    env_vars_bytes_max: int = whole_setting(
        256 << 10, 0, 16 << 20, "Names and values of one sandbox's envVars, in UTF-8."
    )
    idempotency_entries_max: int = whole_setting(
        10_000, 1, 1_000_000, "Remembered Idempotency-Keys; the oldest is forgotten."
    )
    idempotency_ttl_s: float = seconds_setting(_DAY_S, 1.0, 30 * _DAY_S, "How long an answer is replayed.")


@dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration. `sources` tells, per key, where its value came from."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    virtualization: VirtualizationConfig = dataclasses.field(default_factory=VirtualizationConfig)
    guest: GuestConfig = dataclasses.field(default_factory=GuestConfig)
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    snapshot: SnapshotConfig = dataclasses.field(default_factory=SnapshotConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    images: ImagesConfig = dataclasses.field(default_factory=ImagesConfig)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def listen_address(self) -> tuple[str, int]:
        """`server.listen` as host and port."""
        return _split_listen(self.server.listen)

    @property
    def domain(self) -> str:
        """The domain that clients are told, with its port where it has one."""
        return self.server.domain or f"localhost:{self.listen_address[1]}"

    @property
    def domain_host(self) -> str:
        """The domain without a port: what the proxy compares Host headers with."""
        return self.domain.partition(":")[0]

    @property
    def run_dir(self) -> Path:
        """RUN: short, because Unix socket paths are limited, and gone after a reboot, as its contents should be."""
        if self.server.run_dir is not None:
            return self.server.run_dir
        real = os.path.realpath(self.server.state_dir)
        return Path(_RUN_ROOT) / hashlib.sha256(os.fsencode(real)).hexdigest()[:10]

    @property
    def api_keys_file(self) -> Path:
        """Where accepted API keys are."""
        return self.server.api_keys_file or self.server.state_dir / "api_keys"

    @property
    def repository_dir(self) -> Path:
        """The directory of the posix_fs repository."""
        return self.snapshot.posix_fs.path or self.server.state_dir / "repository"

    @property
    def cache_dir(self) -> Path:
        """The folder of the block cache."""
        return self.cache.dir or self.server.state_dir / "cache" / "blocks"


def _section(field: dataclasses.Field[Any]) -> type | None:
    """The dataclass of a field that is a section, None for a setting."""
    factory: Any = field.default_factory
    return factory if isinstance(factory, type) and dataclasses.is_dataclass(factory) else None


def _walk(cls: type, prefix: str) -> Iterator[Setting]:
    for field in dataclasses.fields(cls):
        if (section := _section(field)) is not None:
            yield from _walk(section, f"{prefix}{field.name}.")
        elif "kind" in field.metadata:
            yield Setting(key=prefix + field.name, default=field.default, **field.metadata)


SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({item.key: item for item in _walk(Config, "")})

# Names that the documentation of later versions uses. Refusing them by name is kinder than "unknown key", and
# accepting them would promise something that does not happen.
_NOT_YET: Final[Mapping[str, str]] = {
    "p2p": "peer-to-peer distribution",
}


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read, check and combine all sources.

    `path` is the file named by `--config`, which must exist; without it `DEFAULT_PATH` is read if it is there.
    Raises `ConfigError`, naming the key and where its value came from.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    chosen = path or (DEFAULT_PATH if DEFAULT_PATH.exists() else None)
    if chosen is not None:
        for key, value in _flatten(_read_file(chosen)):
            values[key] = from_toml(_lookup(key, str(chosen)), value, str(chosen))
            sources[key] = str(chosen)
    for key, name, raw in _from_environment(os.environ if environ is None else environ):
        values[key] = from_text(SETTINGS[key], raw, name)
        sources[key] = name
    for key, value in values.items():
        check(SETTINGS[key], value, sources[key])
    complete = {key: sources.get(key, "default") for key in SETTINGS}
    built: Config = _build(Config, "", values)
    config = dataclasses.replace(built, sources=MappingProxyType(complete))
    _check_together(config)
    return config


def effective(config: Config) -> list[tuple[Setting, Any, str]]:
    """Every setting with its value in use (derived ones filled in) and its source, for `aenv config show`."""
    derived = {
        "server.domain": config.domain,
        "server.run_dir": config.run_dir,
        "server.api_keys_file": config.api_keys_file,
        "snapshot.posix_fs.path": config.repository_dir,
        "cache.dir": config.cache_dir,
    }
    rows: list[tuple[Setting, Any, str]] = []
    for key, item in SETTINGS.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        source = config.sources.get(key, "default")
        rows.append((item, derived.get(key, value), "derived" if key in derived and not value else source))
    return rows


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, dict) or not any(key.startswith(f"{prefix}{name}.") for key in SETTINGS):
            # An empty table is fine where it is a section and an unknown key elsewhere.
            yield prefix + name, value


def _lookup(key: str, source: str) -> Setting:
    if (found := SETTINGS.get(key)) is not None:
        return found
    for prefix, feature in _NOT_YET.items():
        if key == prefix or key.startswith(prefix + "."):
            raise ConfigError(f"{key} ({source}): {feature} is not in this version")
    raise ConfigError(f"{key} ({source}): unknown key")


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Key, variable name and text of each setting in the environment.

    Only names that begin like a section are ours to judge: AENV_API_URL and AENV_API_KEY belong to the client.
    """
    by_name = {item.env_name: key for key, item in SETTINGS.items()}
    sections = tuple(f"{ENV_PREFIX}{name.upper()}_" for name in {key.split(".")[0] for key in SETTINGS})
    later = {ENV_PREFIX + prefix.upper().replace(".", "_") + "_": feature for prefix, feature in _NOT_YET.items()}
    for name in sorted(environ):
        if name in by_name:
            yield by_name[name], name, environ[name]
            continue
        for prefix, feature in later.items():
            if name.startswith(prefix):
                raise ConfigError(f"{name} (environment): {feature} is not in this version")
        if name.startswith(sections):
            raise ConfigError(f"{name} (environment): unknown key")


def _build(cls: type, prefix: str, values: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if (section := _section(field)) is not None:
            given[field.name] = _build(section, f"{prefix}{field.name}.", values)
        elif prefix + field.name in values:
            given[field.name] = values[prefix + field.name]
    return cls(**given)


def _check_together(config: Config) -> None:
    """Checks of shape, and of settings that only make sense together."""
    _split_listen(config.server.listen)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?", config.domain):
        raise ConfigError(f"server.domain: {config.server.domain!r} is not a host name (with an optional port)")
    if len(str(config.run_dir)) > _RUN_DIR_CHARS_MAX:
        raise ConfigError(f"server.run_dir: longer than {_RUN_DIR_CHARS_MAX} characters, too long for Unix sockets")
    if config.sandbox.timeout_s_default > config.sandbox.timeout_s_max:
        raise ConfigError("sandbox.timeout_s_default: larger than sandbox.timeout_s_max")
    check_storage(config.snapshot, config.images)
    try:
        subnet = ipaddress.IPv4Network(config.network.subnet)
    except ValueError as error:
        raise ConfigError(f"network.subnet: {error}") from error
    if not 8 <= subnet.prefixlen <= 28:
        raise ConfigError(f"network.subnet: /{subnet.prefixlen} is outside /8 to /28")
    if not config.network.dns:
        raise ConfigError("network.dns: at least one resolver is needed")
    for address in config.network.dns:
        try:
            ipaddress.IPv4Address(address)
        except ValueError as error:
            raise ConfigError(f"network.dns: {error}") from error


def _split_listen(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    address = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        raise ConfigError(f"server.listen: {listen!r} is not ADDRESS:PORT") from error
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ConfigError(f"server.listen: {listen!r} needs a port from 1 to 65535")
    return address, int(port)
