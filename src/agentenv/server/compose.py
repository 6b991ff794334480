"""Makes a node out of a configuration: every collaborator once, in the order of their needs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentenv.block import BlockClient, BlockDaemon
from agentenv.clock import RealClock
from agentenv.config import Config
from agentenv.errors import ConfigError, HostUnsuitable
from agentenv.guest import client as envd
from agentenv.guest.initramfs import PROBE_MARKER
from agentenv.guest.kernel import GuestFiles, prepare_guest
from agentenv.images import (
    Converter,
    HostSettings,
    ImageProgram,
    RegistryClient,
    RegistryReference,
    RegistrySettings,
    RepositoryLayers,
    WholeLayers,
    store_entry,
)
from agentenv.network import NetworkSettings, PoolSettings, SlotPool, host_resolvers, node_tag, open_pool
from agentenv.node.admission import Admission, Limits, memory_mib
from agentenv.node.database import Database
from agentenv.node.following import referable
from agentenv.node.host import Host, Paths, boot_id
from agentenv.node.images import MemoryImages
from agentenv.node.layers import Layers
from agentenv.node.node import Node, NodeSettings
from agentenv.node.prefetching import FirstStarts
from agentenv.node.tokens import Tokens, load_or_create_secret
from agentenv.server.image_records import ImageRecords
from agentenv.server.images import Images
from agentenv.server.proxy import ProxyDaemon, ProxyWithdrawals
from agentenv.server.repositories import Opened, check_configured, open_configured, open_stores
from agentenv.server.stores import StoresFile
from agentenv.snapshots import Catalog
from agentenv.snapshots.converted import ConvertedLayers
from agentenv.templates.builder import Builder
from agentenv.vmm import GuestKernel
from agentenv.vmm.probe import ProbeInputs, choose_driver

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Composition:
    """A node and the daemons that it stands on."""

    config: Config
    host: Host
    node: Node
    blockd: BlockDaemon
    proxy: ProxyDaemon
    repository: Opened
    stores: StoresFile
    converted: ConvertedLayers
    image_records: ImageRecords
    # Whether no blockd ran before this start: then no sandbox stands on it.
    began_blockd: bool


def cache_dir() -> Path:
    """Unpacked kernels and root file systems, shared by all nodes of this user; may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "aenv"


def make_directories(config: Config) -> None:
    """STATE, RUN and their parts. Raises `HostUnsuitable` naming the one that cannot be made."""
    state, run = config.server.state_dir, config.run_dir
    for directory in (state, state / "logs", state / "sandboxes", state / "guest", state / "blockd", run, run / "vm"):
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise HostUnsuitable(f"{directory} cannot be made: {error.strerror}; run as root") from error


async def compose(config: Config) -> Composition:
    """Start or adopt blockd, probe the driver, open everything. Does not recover yet, nor start the proxy.

    If it fails, a blockd that it started is gone again; one that was there may serve sandboxes, and stays.
    """
    state, run, bin_dir = config.server.state_dir, config.run_dir, config.server.bin_dir
    block = BlockClient(run / "blockd.sock")
    opened = await asyncio.to_thread(open_configured, config, block)
    # Before the daemons of running sandboxes are told of stores and keys with which nothing can be read.
    await check_configured(opened)
    stores = await asyncio.to_thread(open_stores, config)
    blockd = BlockDaemon(
        bin_dir=bin_dir,
        run_dir=run,
        state_dir=state,
        stores=stores.path,
        cache_dir=config.cache_dir,
        cache_size_bytes_max=config.cache.size_bytes_max,
        memory_outage_s=config.cache.memory_outage_s,
    )
    began_blockd = not blockd.is_running()
    try:
        await blockd.ensure()
        return await _compose_over(config, blockd, block, opened, stores, began_blockd)
    except BaseException:
        if began_blockd:
            await blockd.stop()
        raise


async def _compose_over(
    config: Config, blockd: BlockDaemon, block: BlockClient, opened: Opened, stores: StoresFile, began_blockd: bool
) -> Composition:
    """All that needs a blockd which answers."""
    state, run, bin_dir = config.server.state_dir, config.run_dir, config.server.bin_dir
    guest = await asyncio.to_thread(prepare, config)
    kernel = GuestKernel(guest.vmlinux, guest.initramfs, guest.version)
    driver, report = await choose_driver(probe_inputs(config, guest))
    proxy = ProxyDaemon(bin_dir, run, state / "logs", config.server.listen, config.domain_host)
    await opened.repository.load()
    layers = Layers(opened.repository, opened.grace_s, _registry_teller(config, stores))
    slots = _open_slots(config)
    await slots.start()
    host = Host(
        paths=Paths(state, run),
        clock=RealClock(),
        database=Database(state / "node.db"),
        layers=layers,
        catalog=Catalog(referable(opened.repository.all()).values()),
        images=MemoryImages(block, layers),
        first_starts=FirstStarts(block, layers, opened.store, state / "staging", config.cache.fill_bytes_per_s_max),
        block=block,
        slots=slots,
        driver=driver,
        kernel=kernel,
        tokens=Tokens(load_or_create_secret(state / "secret")),
        admission=_admission(config),
        proxy=ProxyWithdrawals(proxy.control),
        guest=envd,
        boot_id=boot_id(),
        pause_linger_s=config.sandbox.pause_linger_s,
        collect_soon=lambda: None,
    )
    settings = NodeSettings(
        config.sandbox.fork_count_max, config.pool.warm_per_template, report.explain(), config.snapshot.refresh_s
    )
    converted = ConvertedLayers(opened.store, opened.repository)
    image_records = ImageRecords(opened.store, converted)
    node = Node(host, settings)
    return Composition(config, host, node, blockd, proxy, opened, stores, converted, image_records, began_blockd)


def make_images(composition: Composition, builder: Builder) -> Images:
    """The node's images. Raises `ConfigError`."""
    config, host, opened = composition.config, composition.host, composition.repository
    staging = config.server.state_dir / "staging" / "images"
    program = ImageProgram(config.server.bin_dir / "aenv-image")
    local_layers = RepositoryLayers(composition.converted, opened.repository.path, host.block.compact)
    client = RegistryClient(registry_settings(config))
    return Images(
        composition.node,
        host.layers,
        builder,
        composition.image_records,
        local_layers,
        Converter(local_layers, program, staging),
        WholeLayers(local_layers, host.block.compact, staging),
        program,
        client,
        composition.stores,
        staging,
        host.clock,
    )


def _registry_teller(config: Config, stores: StoresFile) -> Callable[[dict[str, str]], None]:
    """Makes a registry known to blockd with this node's credentials, also for an image that another node pulled."""
    settings = registry_settings(config)

    def tell(origin: dict[str, str]) -> None:
        if origin.get("kind") == "registry":
            reference = RegistryReference(origin["registry"], origin["repository"])
            stores.add_registry(reference.registry, store_entry(reference, settings))

    return tell


def registry_settings(config: Config) -> RegistrySettings:
    """[images] as the registry client knows it. Raises `ConfigError`."""
    images = config.images
    mirrors: dict[str, tuple[str, ...]] = {}
    for entry in images.mirrors:
        registry, _, url = entry.partition("=")
        mirrors[registry] = (*mirrors.get(registry, ()), url)
    names = {*mirrors, *images.insecure}
    hosts = {name: HostSettings(mirrors=mirrors.get(name, ()), insecure=name in images.insecure) for name in names}
    auth_file = images.auth_file
    if auth_file is None:
        usual = Path.home() / ".docker" / "config.json"
        auth_file = usual if usual.exists() else None
    elif not auth_file.is_file():
        raise ConfigError(f"images.auth_file: {auth_file} is not a file")
    return RegistrySettings(hosts, auth_file)


def _open_slots(config: Config) -> SlotPool:
    idle_min = config.network.slot_pool_idle_min
    pool = PoolSettings(slot_pool_idle_count_min=idle_min, slot_pool_idle_count_max=max(32, idle_min * 2))
    # The host's own resolvers unless somebody chose others: public ones are out of reach of many hosts.
    dns = host_resolvers() if config.sources.get("network.dns") == "default" else config.network.dns
    subnet = ipaddress.IPv4Network(config.network.subnet)
    return open_pool(NetworkSettings(node_tag(config.run_dir), dns, subnet, pool))


def _admission(config: Config) -> Admission:
    sandbox = config.sandbox
    limits = Limits(
        live_count_max=sandbox.live_count_max,
        start_concurrency_max=sandbox.start_concurrency_max,
        start_queue_length_max=sandbox.start_queue_length_max,
        start_wait_s_max=sandbox.start_wait_s_max,
        memory_total_mib=memory_mib("MemTotal"),
        memory_reserve_mib=sandbox.memory_reserve_mib,
        cpu_count=os.cpu_count() or 1,
    )
    return Admission(limits, lambda: memory_mib("MemAvailable"))


def prepare(config: Config) -> GuestFiles:
    """Kernel and initramfs of this node's guests. Blocks (a download the first time)."""
    return prepare_guest(
        config.server.bin_dir / "aenv-envd",
        config.server.state_dir / "guest",
        cache_dir() / "kernels",
        kernel=config.guest.kernel,
        modules_dir=config.guest.modules_dir,
    )


def probe_inputs(config: Config, guest: GuestFiles) -> ProbeInputs:
    """The probe has a tiny guest of its own: it tells whether guests boot, not whether our daemon works."""
    return ProbeInputs(
        kernel=GuestKernel(guest.vmlinux, guest.probe_initramfs, guest.version),
        marker=PROBE_MARKER,
        launcher=config.server.bin_dir / "aenv-launch",
        # What was found holds for the host, not for one node: a new node need not wait for KVM to fail again.
        cache_dir=cache_dir(),
        run_dir=config.run_dir,
        driver=config.virtualization.driver,
        accelerator=config.virtualization.accelerator,
    )
