"""Which of the engine's branches ends at which turn.

A branch follows its conversation: the next turn takes over the name of its parent's branch, a fork gets a new
one. The names are bounded; the one used least is given back to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from engine.api import EngineClient, EngineDead
from sessions.lru import BoundedMap
from sessions.tree import TurnNode

log = logging.getLogger(__name__)

MAX_BRANCHES = 4096


class Branches:
    """The branches the engine was told to keep, by owner and name, with the turn each one ends at."""

    def __init__(self, engine: EngineClient, limit: int = MAX_BRANCHES) -> None:
        self._engine = engine
        self._tips: BoundedMap[tuple[str, str], str] = BoundedMap(limit, on_drop=self._dropped)
        self._releasing: set[asyncio.Task[None]] = set()

    def take(self, owner: str, parent: TurnNode | None, response_id: str, new_name: str) -> str:
        """The branch a new turn shall end: its parent's if that ends there, else `new_name`."""
        name = new_name
        if (
            parent is not None
            and parent.branch is not None
            and self._tips.get((owner, parent.branch)) == parent.id
        ):
            name = parent.branch
        self._tips.put((owner, name), response_id)
        return name

    def give_up(self, owner: str, name: str, parent: TurnNode | None) -> None:
        """The turn that took the branch came to nothing: it ends at the parent again, if it ever did."""
        if parent is not None and parent.branch == name:
            self._tips.put((owner, name), parent.id)
        else:
            self.release(owner, name)

    def release_tip(self, node: TurnNode) -> None:
        """Let the engine forget the branch that ends at this turn, if one does."""
        if node.branch is not None and self._tips.get((node.owner, node.branch)) == node.id:
            self.release(node.owner, node.branch)

    def release(self, owner: str, name: str) -> None:
        if self._tips.pop((owner, name)) is not None:
            self._dropped((owner, name), "")

    async def close(self) -> None:
        await asyncio.gather(*self._releasing)

    def _dropped(self, key: tuple[str, str], tip: str) -> None:
        task = asyncio.create_task(self._release(*key))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, owner: str, name: str) -> None:
        # An engine that is gone has forgotten it already.
        with contextlib.suppress(EngineDead):
            await self._engine.release(owner, name)
