"""Who is converting what in this process: one conversion for each key, however many wait for it.

A claim is taken without waiting and given back whatever happens, so that whoever waited looks again and goes on by
itself where the first one failed. No task is shared: a cancel ends the work of the cancelled one alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Claims:
    """Keys that somebody works on. For one event loop.

    Waiting cannot deadlock as long as each holder works through its keys from the bottom of the chain: keys of a chain
    name all below them, so the holder of the lowest key waits for nobody.
    """

    def __init__(self) -> None:
        self._held: dict[str, asyncio.Event] = {}

    def take(self, keys: Iterable[str]) -> set[str]:
        """Claim those that nobody has; they are the caller's to release."""
        taken = {key for key in keys if key not in self._held}
        self._held.update((key, asyncio.Event()) for key in taken)
        return taken

    async def wait(self, key: str) -> bool:
        """Wait until nobody has the key; False when nobody had it."""
        if (event := self._held.get(key)) is None:
            return False
        await event.wait()
        return True

    def release(self, keys: Iterable[str]) -> None:
        """Give back and wake who waits."""
        for key in list(keys):
            self._held.pop(key).set()
