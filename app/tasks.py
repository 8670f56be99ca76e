"""Ending tasks without losing track of who cancelled whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their ends; what one of them raised goes to the log.

    Not `gather`: when the caller is cancelled meanwhile, that would raise the tasks' cancellation.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a task failed", exc_info=exc)


@contextlib.asynccontextmanager
async def closing(events: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator when the block ends, not when the garbage collector comes by: its end is a signal."""
    try:
        yield events
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


class Background:
    """Work that must be finished even if whoever began it is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the work; if the waiting is cancelled, it goes on."""
        task = asyncio.create_task(work)
        # The event loop itself keeps only weak references.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def wait(self) -> None:
        """Return when nothing is left to finish."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))
