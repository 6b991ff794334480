"""One node in the foreground: daemons, recovery, two sockets, supervision, and an orderly end.

lock -> blockd -> probe -> compose -> recover -> sockets -> proxy -> base template -> "ready" on standard output
SIGINT or SIGTERM: refuse new work -> let requests end -> leave sandboxes running (daemons too, if any runs)
A start that fails ends what it started, and leaves a former server's sandboxes with their daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import IO, Any, Final

import uvicorn
from starlette.types import ASGIApp

from agentenv.api import create_app
from agentenv.api.internal import create_internal_app
from agentenv.api.keys import ApiKeys, load_or_create
from agentenv.api.settings import ApiSettings
from agentenv.config import Config
from agentenv.errors import AenvError, HostUnsuitable
from agentenv.server.compose import Composition, cache_dir, compose, make_directories, make_images
from agentenv.server.storage import Storage
from agentenv.templates.builder import Builder

log = logging.getLogger(__name__)

SUPERVISE_S: Final = 0.5
GRACE_S: Final = 5


async def serve(config: Config, *, ensure_template: bool, ready: IO[str]) -> None:
    """Run until SIGINT or SIGTERM. Writes one JSON line to `ready` when requests are answered."""
    make_directories(config)
    with _only_server_of(config.server.state_dir):
        keys = load_or_create(config.api_keys_file)
        composition = await compose(config)
        try:
            await composition.node.recover()
        except BaseException:
            # Which VMs run is not known then; none does over a blockd that was not there before.
            await _end(composition, keep=not composition.began_blockd)
            raise
        try:
            await _answer(composition, keys, ensure_template=ensure_template, ready=ready)
        finally:
            # Without any VM the daemons have nothing to keep alive, and end too.
            await _end(composition, keep=composition.node.has_live_vmm())


async def _answer(composition: Composition, keys: ApiKeys, *, ensure_template: bool, ready: IO[str]) -> None:
    """Serve requests until a signal comes."""
    config, node = composition.config, composition.node
    stop = asyncio.Event()
    _stop_on_signals(stop)
    settings = ApiSettings.from_config(config)
    builder = _builder(composition)
    images = make_images(composition, builder)
    storage = Storage(config, composition.host, node, composition.image_records)
    public = create_app(node, keys, settings, builder=builder, images=images, storage=storage)
    internal = create_internal_app(node)
    run = config.run_dir
    async with _listening(public, run / "api.sock"), _listening(internal, run / "internal.sock"):
        await composition.proxy.ensure()
        await _tell_live(composition)
        supervisor = asyncio.create_task(_supervise(composition), name="supervise daemons")
        try:
            if ensure_template:
                await _unless_stopped(builder.ensure_base(), stop)
            if not stop.is_set():
                _say_ready(config, keys.first(), composition, ready)
            await stop.wait()
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
            await images.close()
            log.info("stopping; sandboxes go on")


async def _end(composition: Composition, *, keep: bool) -> None:
    """Hand over to the next server; `keep` says whether the daemons go on for it."""
    await composition.node.shut_down()
    await composition.host.slots.close()
    if not keep:
        await composition.proxy.stop()
        await composition.blockd.stop()
    await composition.host.block.close()
    composition.host.database.close()


async def _supervise(composition: Composition) -> None:
    """Start again what died. Keeper and blockd watch each other too; this is for the death of both, and the proxy."""
    while True:
        await asyncio.sleep(SUPERVISE_S)
        try:
            if not composition.proxy.is_alive():
                log.warning("the proxy is gone; starting another")
                await composition.proxy.ensure()
                await _tell_live(composition)
            await composition.blockd.ensure()
        except AenvError as error:
            log.error("a daemon could not be started again: %s", error)


async def _tell_live(composition: Composition) -> None:
    """A proxy that ran before this server may hold answers about sandboxes that have ended meanwhile."""
    generations, below = composition.node.live_generations()
    await composition.proxy.control.live(generations, below)


def _builder(composition: Composition) -> Builder:
    host = composition.host
    return Builder(composition.node, host.block, host.layers, cache_dir() / "rootfs", _progress)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _unless_stopped(job: Coroutine[Any, Any, Any], stop: asyncio.Event) -> None:
    """Run a long start-up job, but end it at once when the user gives up."""
    task = asyncio.create_task(job)
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _say_ready(config: Config, api_key: str, composition: Composition, ready: IO[str]) -> None:
    host, port = config.listen_address
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    line = {
        "api_url": url,
        "sandbox_url": url,
        "api_key": api_key,
        "accelerator": composition.host.driver.accelerator,
    }
    print(json.dumps(line), file=ready, flush=True)


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to us: two of them share one loop and one end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _listening(app: ASGIApp, path: Path) -> AsyncIterator[None]:
    """Serve an app on a Unix socket; on exit, stop accepting and give running requests a few seconds."""
    path.unlink(missing_ok=True)
    options = uvicorn.Config(
        app,
        uds=str(path),
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=3600,
    )
    server = _Uvicorn(options)
    task = asyncio.create_task(server.serve(), name=f"serve {path.name}")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise HostUnsuitable(f"{path} could not be served")
            await asyncio.sleep(0.005)
        os.chmod(path, 0o600)
        yield
    finally:
        server.should_exit = True
        await task
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_server_of(state_dir: Path) -> Iterator[None]:
    """One server per state directory; the lock dies with the process."""
    descriptor = os.open(state_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HostUnsuitable(f"another aenv server already uses {state_dir}") from error
        yield
    finally:
        os.close(descriptor)
