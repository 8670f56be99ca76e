"""The front's end: `EngineClient` over an engine process that is restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from engine.api import (
    EngineDead,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    Output,
    RequestError,
    pack_record,
)
from engine.config import EngineConfig
from engine.ipc import Message, unpack_output
from engine.process import EngineProcess
from engine.restarts import RestartBudget

log = logging.getLogger(__name__)

ProgressCallback = Callable[[str, float], None]
"""Called while the engine loads with a stage's name and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class _Life:
    """How one engine process did: whether it ever got to answer requests, and how it ended."""

    was_up: bool
    ending: str


class _Stream:
    """What arrived for one request and was not taken yet: one merged output, however slow the reader is."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._merged: Output | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        waiting = self._merged
        self._merged = Output(
            self.request_id,
            output.token_ids if waiting is None else waiting.token_ids + output.token_ids,
            output.finish_reason,
            output.prompt or (waiting.prompt if waiting is not None else None),
            output.error,
        )
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> Output:
        """The next output; what arrived before a failure comes before it."""
        await self._arrived.wait()
        if self._merged is None:
            assert self._error is not None
            raise self._error
        output, self._merged = self._merged, None
        if self._error is None:
            self._arrived.clear()
        return output


class ProcessEngineClient:
    """Implements `engine.api.EngineClient`. Belongs to the event loop that called `start`."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: ProgressCallback | None = None,
        *,
        restarts: RestartBudget | None = None,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._restarts = restarts or RestartBudget()
        self._process: EngineProcess | None = None
        self._info: EngineInfo | None = None
        self._failure: str | None = None  # why the engine is down for good
        self._last_words: str | None = None  # the engine's own, why it could not start
        self._settled = asyncio.Event()  # either ready or down for good
        self._lost = asyncio.Event()  # down for good, and nobody asked for it
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self._wire_ids = itertools.count()
        self._streams: dict[str, _Stream] = {}  # by the id on the wire
        self._stats: deque[asyncio.Future[EngineStats]] = deque()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead(self._failure or "the engine is not up")
        return self._info

    @property
    def ready(self) -> bool:
        return self._info is not None

    @property
    def failure(self) -> str | None:
        """Why the engine is down and stays so; None while it is up or on its way."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """The engine process's id, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the engine and wait until it is loaded.

        Raises `RuntimeError` with its own words if it cannot.
        """
        if self._supervisor is not None:
            raise RuntimeError("the engine client was already started")
        self._supervisor = asyncio.create_task(self._supervise())
        await self._settled.wait()
        if self._info is None:
            raise RuntimeError(self._failure)

    async def wait_ready(self) -> None:
        """Wait until an engine is up, over a restart too. Raises `EngineDead` once it is down for good."""
        await self._settled.wait()
        if self._info is None:
            raise EngineDead(self._failure)

    async def wait_lost(self) -> str:
        """Why the engine is down for good, once it is. Being closed is no such reason."""
        await self._lost.wait()
        return self._failure or ""

    async def close(self) -> None:
        """End the process; running streams raise `EngineDead`. Returns when it is gone."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Output]:
        """Stream one answer, submitted when the first output is asked for. See `EngineClient.generate`."""
        process = self._process
        if self._info is None or process is None:
            raise EngineDead(self._failure or "the engine is not up")
        if any(stream.request_id == request.request_id for stream in self._streams.values()):
            raise RequestError(
                f"request_id {request.request_id!r} is already in use",
                param="request_id",
                code="duplicate_request",
            )
        # The caller may use an id again as soon as its stream is closed; on the wire no id comes twice, so
        # that a late output of the first is never taken for one of the second.
        wire_id = str(next(self._wire_ids))
        stream = self._streams[wire_id] = _Stream(request.request_id)
        process.send(
            {"type": "submit", "request": pack_record(dataclasses.replace(request, request_id=wire_id))}
        )
        ended = False
        try:
            while not ended:
                output = await stream.take()
                ended = output.finish_reason is not None
                yield output
        except (RequestError, EngineDead):
            ended = True
            raise
        finally:
            self._streams.pop(wire_id, None)
            if not ended:
                process.send({"type": "abort", "request_id": wire_id})

    async def abort(self, request_id: str) -> None:
        for wire_id, stream in self._streams.items():
            if stream.request_id == request_id and self._process is not None:
                self._process.send({"type": "abort", "request_id": wire_id})

    async def release(self, tenant: str, branch: str) -> None:
        """Forget a branch. With no engine up there is nothing to forget."""
        if self._info is not None and self._process is not None:
            self._process.send({"type": "release", "tenant": tenant, "branch": branch})

    async def stats(self) -> EngineStats:
        """Raises `EngineDead` while no engine is up."""
        if self._info is None or self._process is None:
            raise EngineDead(self._failure or "the engine is not up")
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(answer)
        self._process.send({"type": "stats"})
        return await answer

    async def _supervise(self) -> None:
        """Keep an engine running until `close`, or until there is no use in starting it again."""
        try:
            was_up = False
            while True:
                life = await self._run_once()
                was_up = was_up or life.was_up
                log.error("the engine process ended: %s", life.ending)
                if not was_up:
                    # What never ran yet won't run for being tried again: a wrong setting, a missing model.
                    return self._give_up(f"the engine cannot start: {life.ending}")
                delay = self._restarts.next_delay(time.monotonic())
                if delay is None:
                    return self._give_up(f"the engine ended too often: {life.ending}")
                await asyncio.sleep(delay)
        finally:
            if self._failure is None:
                self._give_up("the engine client is closed")

    async def _run_once(self) -> _Life:
        """One life of the engine process, from start to end."""
        try:
            process = self._process = await EngineProcess.spawn(self._config)
        except OSError as error:
            return _Life(False, f"no process: {error}")
        self._last_words = None
        healthy = True
        was_up = False
        try:
            async for message in process.messages():
                self._handle(message)
        except Exception:
            log.exception("the engine process sent what it should not have")
            healthy = False
        finally:
            was_up = self._info is not None
            self._process = self._info = None
            self._settled.clear()
            self._fail_all()
            ending = await process.end(patient=healthy and (was_up or not self._closing))
        return _Life(was_up, self._last_words or ending)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "outputs":
            for values in message["outputs"]:
                output = unpack_output(values)
                # Unknown: its caller closed the stream, and the abort is still on its way.
                if output.request_id in self._streams:
                    self._streams[output.request_id].put(output)
        elif kind == "refused":
            if message["request_id"] in self._streams:
                error = RequestError(message["message"], param=message["param"], code=message["code"])
                self._streams[message["request_id"]].fail(error)
        elif kind == "stats":
            answer = self._stats.popleft()
            if not answer.done():
                answer.set_result(EngineStats(**message["stats"]))
        elif kind == "progress":
            if self._on_progress is not None:
                self._on_progress(message["stage"], message["fraction"])
        elif kind == "ready":
            self._info = EngineInfo(**message["info"])
            self._settled.set()
        elif kind == "failed":
            self._last_words = message["message"]
        elif kind == "fault":
            log.error("the engine could not read a message: %s", message["message"])
        else:
            raise ValueError(f"a message of unknown type {kind!r}")

    def _fail_all(self) -> None:
        """Whoever waits for the engine that just ended learns of it."""
        error = "the engine process ended before its answer did"
        for stream in self._streams.values():
            stream.fail(EngineDead(error))
        self._streams.clear()
        while self._stats:
            answer = self._stats.popleft()
            if not answer.done():
                answer.set_exception(EngineDead(error))

    def _give_up(self, failure: str) -> None:
        self._failure = failure
        self._settled.set()
        if not self._closing:
            self._lost.set()
