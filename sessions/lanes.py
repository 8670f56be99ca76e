"""One writer a conversation: turns begun on the same conversation run one after the other, in their order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sessions.api import SessionError

MAX_WAITING = 16


@dataclass(slots=True)
class Lane:
    """`asyncio.Lock` is fair: whoever waits longest is next."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Lanes:
    """A lane for each conversation that is being written; it is gone with its last user."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._lanes: dict[str, Lane] = {}
        self._max_waiting = max_waiting

    def __len__(self) -> int:
        return len(self._lanes)

    def busy(self, conversation_id: str) -> bool:
        return conversation_id in self._lanes

    def join(self, conversation_id: str) -> Place:
        """A place in the lane. Raises `SessionError` when too many wait."""
        lane = self._lanes.setdefault(conversation_id, Lane())
        if lane.users > self._max_waiting:
            raise SessionError(
                f"{self._max_waiting} turns wait in this conversation already.",
                code="conversation_queue_full",
                status=429,
                type="rate_limit_error",
                param="conversation",
            )
        lane.users += 1
        return Place(self, conversation_id, lane)

    def leave(self, conversation_id: str, lane: Lane) -> None:
        lane.users -= 1
        if lane.users == 0:
            del self._lanes[conversation_id]


class Place:
    """A place in a lane: taken once, given up once."""

    def __init__(self, lanes: Lanes, conversation_id: str, lane: Lane) -> None:
        self._lanes = lanes
        self._conversation_id = conversation_id
        self._lane = lane
        self._held = False
        self._left = False

    async def take(self) -> None:
        """Return when it is this one's turn."""
        await self._lane.lock.acquire()
        self._held = True

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        if self._held:
            self._lane.lock.release()
        self._lanes.leave(self._conversation_id, self._lane)
