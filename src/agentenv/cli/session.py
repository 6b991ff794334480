"""From a synchronous command to the asynchronous client and back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from agentenv.cli.settings import Settings

if TYPE_CHECKING:
    from agentenv.client import AenvClient, Progress, Sandbox

T = TypeVar("T")


def without_httpx_command() -> None:
    """Keep httpx from importing its own command line tool, which costs 190 of the 290 ms of `import httpx`.

    None in `sys.modules` makes that import fail, for which httpx has a fallback; nothing else of httpx changes.
    """
    if "httpx" not in sys.modules:
        cast("dict[str, Any]", sys.modules).setdefault("httpx._main", None)


def new_client(settings: Settings) -> AenvClient:
    """A client with the effective credentials. Raises `ConfigurationError`."""
    without_httpx_command()
    from agentenv.client import AenvClient

    return AenvClient(settings.api_url, settings.api_key)


def run(settings: Settings, work: Callable[[AenvClient], Awaitable[T]], *, waiting_for: str | None = None) -> T:
    """Run `work` with a client on a fresh event loop, with a spinner when it takes long."""

    async def body() -> T:
        from agentenv.cli.progress import waiting

        async with new_client(settings) as client:
            if waiting_for is None:
                return await work(client)
            async with waiting(waiting_for):
                return await work(client)

    return asyncio.run(body())


def run_with_steps(settings: Settings, work: Callable[[AenvClient, Callable[[Progress], None]], Awaitable[T]]) -> T:
    """Run `work` with a client and with what takes the signs of progress of a long call."""

    async def body() -> T:
        from agentenv.cli.progress import Steps

        async with new_client(settings) as client:
            with Steps() as steps:
                return await work(client, steps.take)

    return asyncio.run(body())


async def open_running(client: AenvClient, sandbox_id: str) -> Sandbox:
    """The handle of a sandbox that can take commands.

    A paused one is refused with the way out, unless it resumes by itself on traffic: resuming takes memory and starts
    the clock, which is for the user to decide.
    """
    sandbox, info = await client.sandboxes.open(sandbox_id)
    if info.state == "paused" and not info.auto_resume:
        raise click.ClickException(f"sandbox {sandbox_id} is paused; run: aenv resume {sandbox_id}")
    return sandbox


def each(settings: Settings, ids: tuple[str, ...], work: Callable[[AenvClient, str], Awaitable[None]]) -> int:
    """Run `work` for every id at once; failures are reported one by one. The exit code is the last failure's, or 0."""
    from agentenv.cli.app import report

    async def all_of(client: AenvClient) -> list[BaseException | None]:
        return await asyncio.gather(*(work(client, item) for item in ids), return_exceptions=True)

    code = 0
    for result in run(settings, all_of):
        if isinstance(result, Exception):
            code = report(result)
        elif result is not None:
            raise result
    return code
