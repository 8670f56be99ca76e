"""Turns of one connection in their order: first in, first out in a lane; lanes run beside each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from app.errors import ApiError
from app.tasks import cancelled
from sessions import Turn

MAX_ACTIVE_LANES = 16
MAX_NAMED_LANES = 32


@dataclass(eq=False, slots=True)
class QueuedTurn:
    """A `response.create` on its way. `live` is set once sessions have begun it."""

    body: Any
    stream_id: str | None
    live: Turn | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class Lane:
    queue: deque[QueuedTurn] = field(default_factory=deque)
    current: QueuedTurn | None = None
    task: asyncio.Task[None] | None = None


class Lanes:
    """At most `MAX_ACTIVE_LANES` turns run at once; more wait. A lane's name is never given back.

    `run` carries out one turn and must not raise.
    """

    def __init__(self, run: Callable[[QueuedTurn], Awaitable[None]], *, depth: int) -> None:
        self._run = run
        self._depth = depth
        self._slots = asyncio.Semaphore(MAX_ACTIVE_LANES)
        self._lanes: dict[str | None, Lane] = {}

    @property
    def waiting(self) -> int:
        return sum(len(lane.queue) for lane in self._lanes.values())

    @property
    def idle(self) -> bool:
        return all(lane.current is None and not lane.queue for lane in self._lanes.values())

    def submit(self, turn: QueuedTurn) -> None:
        """Queue a turn. Raises `ApiError` at too many names or too many waiting turns."""
        lane = self._lanes.get(turn.stream_id)
        if lane is None:
            named = len(self._lanes.keys() - {None})
            if turn.stream_id is not None and named >= MAX_NAMED_LANES:
                raise ApiError(
                    f"A connection may use {MAX_NAMED_LANES} stream ids over its life; open another one.",
                    code="websocket_stream_limit_reached",
                    param="stream_id",
                )
            lane = self._lanes[turn.stream_id] = Lane()
        if self.waiting >= self._depth:
            message = f"{self._depth} turns are waiting on this connection already."
            raise ApiError(message, code="websocket_queue_full", status=429, type="rate_limit_error")
        lane.queue.append(turn)
        if lane.task is None:
            lane.task = asyncio.create_task(self._work(lane))

    def current(self, stream_id: str | None) -> QueuedTurn | None:
        lane = self._lanes.get(stream_id)
        return lane.current if lane else None

    def drop_waiting(self, stream_id: str | None) -> list[QueuedTurn]:
        lane = self._lanes.get(stream_id)
        if lane is None:
            return []
        dropped = list(lane.queue)
        lane.queue.clear()
        return dropped

    async def close(self) -> None:
        """Stop watching every running turn and forget the waiting ones."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for lane in self._lanes.values():
            lane.queue.clear()
        await cancelled(tasks)

    async def _work(self, lane: Lane) -> None:
        try:
            while lane.queue:
                lane.current = lane.queue.popleft()
                async with self._slots:
                    await self._run(lane.current)
        finally:
            lane.current = None
            lane.task = None
