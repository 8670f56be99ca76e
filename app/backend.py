"""What stands behind the front door, and the time it takes to get there.

The server listens before the model is loaded, so that probes and the page can tell "loading" from "down".
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from app.errors import server_busy
from engine.api import EngineClient
from sessions import Sessions

log = structlog.get_logger()

OnStage = Callable[[str, float | None], None]
"""Called with what is being done and how much of it is, from 0 to 1 (None: unknown)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded back end. `close` ends all of it, the engine process and a private store included.

    lost: returns, with the reason, when the engine is down and nobody will start it again.
    """

    sessions: Sessions
    engine: EngineClient
    served_model_name: str
    close: Callable[[], Awaitable[None]]
    lost: Callable[[], Awaitable[str]]


Loader = Callable[[OnStage], Awaitable[Parts]]


class Status(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class Backend:
    """Loads once, in the background.

    failure: what a person is told when it could not, or when the engine was lost later.
    """

    def __init__(self, load: Loader, on_stage: OnStage | None = None) -> None:
        self._load = load
        self._on_stage = on_stage
        self._parts: Parts | None = None
        self.status = Status.LOADING
        self.stage = "starting"
        self.fraction: float | None = None
        self.failure: str | None = None
        self.loaded = asyncio.Event()
        """Set when loading has ended, well or not."""

    @property
    def parts(self) -> Parts:
        """Raises `ApiError` (503) unless everything is loaded."""
        if self._parts is None:
            if self.status is Status.LOADING:
                raise server_busy(f"The server is still loading ({self.stage}).", "server_loading")
            raise server_busy("The server could not load its model.", "server_unavailable", retry_after=30)
        return self._parts

    async def start(self) -> None:
        try:
            self._parts = await self._load(self._report)
        except Exception as exc:
            self.status = Status.FAILED
            self.failure = str(exc) or type(exc).__name__
            log.error("loading failed", stage=self.stage, exc_info=exc)
        else:
            self.status = Status.READY
        finally:
            self.loaded.set()

    async def wait_lost(self) -> None:
        """Return when there is no use in going on: somebody has to look, or to start the server anew."""
        self.failure = await self.parts.lost()
        log.error("the engine is lost", reason=self.failure)

    async def close(self) -> None:
        parts, self._parts = self._parts, None
        self.status = Status.CLOSED
        if parts is not None:
            await parts.close()

    def _report(self, stage: str, fraction: float | None = None) -> None:
        self.stage = stage
        self.fraction = fraction
        if self._on_stage is not None:
            self._on_stage(stage, fraction)
