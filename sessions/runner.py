"""Turns as tasks: begun at once or when their conversation is free, and over with a terminal event always."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from engine.api import EngineClient, EngineDead, EngineInfo
from sessions.admission import Admission, Begun, Busy, Duplicate, check_characters
from sessions.api import Item, SessionError, TurnSpec
from sessions.branches import Branches
from sessions.conversations import owned
from sessions.execution import NOTHING, Execution, fail, internal_error, now
from sessions.ids import new_id
from sessions.items import stored_items
from sessions.lanes import Lanes, Place
from sessions.live import LiveTurn
from sessions.lru import BoundedMap
from sessions.planner import Planner
from sessions.registry import Registry
from sessions.response import Response, new_response, usage
from sessions.store import Store
from sessions.tokenizer import ChatTokenizer
from sessions.turn import TurnWriter

log = logging.getLogger(__name__)

PROGRESS_S = 15.0
"""How often a client that waits for the first token is told that work goes on."""
BUSY_POLL_S = 0.2
RECENT_TURNS, RECENT_TTL_S = 256, 300.0


class TurnRunner:
    """Runs turns, each as a task of its own that no viewer's coming or going touches.

    live: turns that run or wait to. recent: finished ones whose events are still at hand.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ChatTokenizer,
        store: Store,
        planner: Planner,
        registry: Registry,
        branches: Branches,
        *,
        progress_s: float = PROGRESS_S,
    ) -> None:
        self._engine = engine
        self._longest_token = tokenizer.longest_token
        self._store = store
        self._progress_s = progress_s
        self._lanes = Lanes()
        self._tasks: set[asyncio.Task[None]] = set()
        self.live: dict[str, LiveTurn] = {}
        self._admission = Admission(store, planner, registry, branches, self.live)
        self._execution = Execution(engine, tokenizer, store, planner, registry, self._admission)
        self.recent: BoundedMap[str, LiveTurn] = BoundedMap(RECENT_TURNS, ttl_s=RECENT_TTL_S)

    async def end(self, turns: list[LiveTurn]) -> None:
        """Cancel turns and return when they are stored."""
        for live in turns:
            live.cancelled.set()
        await asyncio.gather(*(live.result() for live in turns))

    async def begin(self, spec: TurnSpec) -> LiveTurn:
        """Start a turn, at once or when its conversation is free. Raises `SessionError` or `Duplicate`."""
        info = self._engine_info()
        items = stored_items(spec.input)
        check_characters(items, spec.instructions, info.max_model_len, self._longest_token)
        response = new_response(new_id("resp"), spec, created_at=now(), status="in_progress")
        if spec.conversation_id is None:
            return await self._begin_alone(spec, items, response, info, None)
        # It must be there before a lane is made for it.
        await owned(self._store, spec.owner, spec.conversation_id)
        busy = self._lanes.busy(spec.conversation_id)
        place = self._lanes.join(spec.conversation_id)
        try:
            if not busy:
                await place.take()
                try:
                    return await self._begin_alone(spec, items, response, info, place)
                except Busy:  # another process writes in it; this one waits in front
                    pass
            return self._enqueue(spec, items, response, place, held=not busy)
        except BaseException:
            place.leave()
            raise

    async def _begin_alone(
        self, spec: TurnSpec, items: list[Item], response: Response, info: EngineInfo, place: Place | None
    ) -> LiveTurn:
        begun = await self._admission.prepare(spec, items, response, info)
        live = self._watchable(spec, response)
        live.writer.created()
        self._run(live, lambda: self._execution.carry_out(live, begun, info, place))
        return live

    def _enqueue(
        self, spec: TurnSpec, items: list[Item], response: Response, place: Place, *, held: bool
    ) -> LiveTurn:
        response["status"] = "queued"
        live = self._watchable(spec, response)
        live.writer.created()
        live.writer.queued()
        self._run(live, lambda: self._wait_then_carry_out(live, spec, items, place, held))
        return live

    def _watchable(self, spec: TurnSpec, response: Response) -> LiveTurn:
        live = LiveTurn(
            TurnWriter(response),
            owner=spec.owner,
            # Without a scope nobody can name it; a scope that no connection has says so.
            scope=None if spec.store else spec.scope or response["id"],
            conversation_id=spec.conversation_id,
            cancel_when_unwatched=not spec.store or spec.detach == "cancel",
        )
        self.live[live.response_id] = live
        return live

    def _run(self, live: LiveTurn, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(self._guard(live, work), name=live.response_id)
        self._tasks.add(task)  # the loop itself does not keep tasks alive
        task.add_done_callback(lambda task: self._ended(live, task))

    async def _guard(self, live: LiveTurn, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        ticker = asyncio.create_task(self._report_progress(live.writer))
        try:
            await work()
        except Exception:
            log.exception("turn %s failed", live.response_id)
        finally:
            ticker.cancel()

    def _ended(self, live: LiveTurn, task: asyncio.Task[None]) -> None:
        """Whatever happened, viewers get a terminal event, and nobody waits for what will not come."""
        fail(live.writer, internal_error())
        self._tasks.discard(task)
        del self.live[live.response_id]
        self.recent.put(live.response_id, live)
        live.finish()

    async def _report_progress(self, writer: TurnWriter) -> None:
        while not writer.opened and not writer.log.closed:
            await asyncio.sleep(self._progress_s)
            writer.still_waiting()

    async def _wait_then_carry_out(
        self, live: LiveTurn, spec: TurnSpec, items: list[Item], place: Place, held: bool
    ) -> None:
        try:
            begun = await self._wait_turn(live, spec, items, place, held)
            if begun is None:
                place.leave()
                live.writer.finish("cancelled", completed_at=now(), text="", usage=usage(NOTHING, 0))
                live.writer.emit()
                return
            await self._execution.carry_out(live, begun, self._engine_info(), place)
        except SessionError as exc:
            place.leave()
            fail(live.writer, exc)
        except Duplicate:
            place.leave()
            fail(live.writer, SessionError("The same message began another response.", param="client_msg_id"))
        finally:
            place.leave()

    async def _wait_turn(
        self, live: LiveTurn, spec: TurnSpec, items: list[Item], place: Place, held: bool
    ) -> Begun | None:
        """None: it was cancelled before its turn came."""
        response = live.writer.response
        cancelled = asyncio.create_task(live.cancelled.wait())
        try:
            if not held:
                taking = asyncio.create_task(place.take())
                await asyncio.wait((taking, cancelled), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    taking.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await taking
            while not live.cancelled.is_set():
                response["status"] = "in_progress"
                try:
                    return await self._admission.prepare(spec, items, response, self._engine_info())
                except Busy:
                    response["status"] = "queued"
                    await asyncio.wait((cancelled,), timeout=BUSY_POLL_S)
            return None
        finally:
            cancelled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cancelled

    def _engine_info(self) -> EngineInfo:
        try:
            return self._engine.info
        except EngineDead as exc:
            raise SessionError(
                "The engine is starting; try again in a moment.",
                code="engine_restarting",
                status=503,
                type="server_error",
            ) from exc
