"""A turn that this process is writing. It runs by itself; any number may watch, from any position."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from sessions.api import Event
from sessions.response import Response
from sessions.turn import TurnWriter


class LiveTurn:
    """The front's handle on a running turn, and on a finished one for as long as it is remembered.

    cancel_when_unwatched: the turn ends when its last viewer goes before it is over.
    """

    def __init__(
        self,
        writer: TurnWriter,
        *,
        owner: str,
        scope: str | None,
        conversation_id: str | None,
        cancel_when_unwatched: bool,
    ) -> None:
        self.response_id: str = writer.response["id"]
        self.conversation_id = conversation_id
        self.owner = owner
        self.scope = scope
        self.writer = writer
        self.cancelled = asyncio.Event()
        self._cancel_when_unwatched = cancel_when_unwatched
        self._viewers = 0
        self._over = asyncio.Event()

    def visible_to(self, owner: str, scope: str | None) -> bool:
        """Whether it may be named by this owner over this connection."""
        return self.owner == owner and self.scope in (None, scope)

    async def events(self, starting_after: int = -1) -> AsyncGenerator[Event, None]:
        """Every event numbered above `starting_after`: first those there are, then each as it comes.

        A viewer that is behind gets all the text that waits for it as one delta with the newest number.
        """
        log = self.writer.log
        self._viewers += 1
        try:
            while True:
                for event in log.read(starting_after):
                    starting_after = event["sequence_number"]
                    yield event
                if log.closed and log.last <= starting_after:
                    return
                await log.wait(starting_after)
        finally:
            self._viewers -= 1
            if self._viewers == 0 and self._cancel_when_unwatched and not log.closed:
                self.cancelled.set()

    async def cancel(self) -> None:
        """Ask the turn to end; it does within a step and keeps what it has. Twice is as once."""
        self.cancelled.set()

    async def result(self) -> Response:
        """The finished response."""
        await self._over.wait()
        return self.writer.response

    def finish(self) -> None:
        """For its writer: everything is stored and all events are out."""
        self._over.set()
