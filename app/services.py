"""What the front door is made of at run time: settings, the back end behind it, and what is going on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from app.backend import Backend, Status
from app.config import Settings
from app.errors import server_busy
from app.metrics import Metrics
from app.tasks import Background
from sessions import Sessions

if TYPE_CHECKING:
    from app.connection import Connection

DRAIN_POLL_SECONDS = 0.05


class Services:
    """One a server. `draining` only ever goes from false to true."""

    def __init__(self, settings: Settings, backend: Backend, metrics: Metrics) -> None:
        self.settings = settings
        self.backend = backend
        self.metrics = metrics
        self.connections: set[Connection] = set()
        self.background = Background()
        self.draining = False
        self._turns = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def sessions(self) -> Sessions:
        """Raises `ApiError` (503) while the model loads, or when it could not be loaded."""
        return self.backend.parts.sessions

    @property
    def served_model_name(self) -> str:
        return self.backend.parts.served_model_name

    @contextlib.contextmanager
    def turn_running(self) -> Iterator[None]:
        """Counts a turn that somebody waits for; `drain` waits for it. Raises `ApiError` when draining."""
        if self.draining:
            raise server_busy("The server is shutting down; try again in a moment.", "server_draining")
        self._turns += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._turns -= 1
            if self._turns == 0:
                self._quiet.set()

    async def drain(self, seconds: float) -> bool:
        """Take no new turns and wait for the running ones. False: some still ran when the time was over."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
                # Stored turns that nobody watches have no event of ours.
                while self.backend.status is Status.READY and self.sessions.running:  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
        except TimeoutError:
            return False
        return True
