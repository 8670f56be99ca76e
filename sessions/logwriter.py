"""Copies the events of a running turn to the store, a few times a second, off the answer's own path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable

from sessions.live import LiveTurn
from sessions.store import Store, StoreUnavailable

log = logging.getLogger(__name__)

FLUSH_S = 0.15
IDLE_S = 1.0


class LogWriter:
    """Runs beside a stored turn. It also hears of a cancel that was asked for at another process."""

    def __init__(self, store: Store, live: LiveTurn) -> None:
        self._store = store
        self._live = live
        self._written = -1
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def finish(self) -> None:
        """Write what is left. The result does not depend on it, so a store that fails here is only noted."""
        self._closing.set()
        await self._task
        await self._flush()

    async def _run(self) -> None:
        events = self._live.writer.log
        while not self._closing.is_set():
            await _at_most(IDLE_S, events.wait(self._written))
            await self._flush()
            await _at_most(FLUSH_S, self._closing.wait())

    async def _flush(self) -> None:
        entries = self._live.writer.log.entries(self._written)
        try:
            if await self._store.append_log(self._live.response_id, entries):
                self._live.cancelled.set()
        except StoreUnavailable:
            log.warning("events of %s could not be logged", self._live.response_id)
            return
        if entries:
            self._written = entries[-1].last


async def _at_most(seconds: float, awaited: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaited
