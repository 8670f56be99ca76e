"""How a turn runs: prompt, place in its lane, generation, commit, terminal event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from engine.api import EngineClient, EngineDead, EngineInfo, GenerateRequest, PromptUsage
from sessions import tokens
from sessions.admission import Admission, Begun, Busy, Duplicate, check_characters
from sessions.api import Item, SessionError, TurnSpec
from sessions.branches import Branches
from sessions.conversations import owned
from sessions.generation import Generation, Outcome
from sessions.ids import new_id
from sessions.items import stored_items
from sessions.lanes import Lanes, Place
from sessions.live import LiveTurn
from sessions.logwriter import LogWriter
from sessions.lru import BoundedMap
from sessions.planner import Planner
from sessions.registry import Registry, node_of
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
        self._tokenizer = tokenizer
        self._store = store
        self._planner = planner
        self._registry = registry
        self._progress_s = progress_s
        self._lanes = Lanes()
        self._tasks: set[asyncio.Task[None]] = set()
        self.live: dict[str, LiveTurn] = {}
        self._admission = Admission(store, planner, registry, branches, self.live)
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
        check_characters(items, spec.instructions, info.max_model_len, self._tokenizer.longest_token)
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
        self._run(live, lambda: self._carry_out(live, begun, info, place))
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
        _fail(live.writer, internal_error())
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
                live.writer.finish("cancelled", completed_at=now(), text="", usage=usage(_NOTHING, 0))
                live.writer.emit()
                return
            await self._carry_out(live, begun, self._engine_info(), place)
        except SessionError as exc:
            place.leave()
            _fail(live.writer, exc)
        except Duplicate:
            place.leave()
            _fail(
                live.writer, SessionError("The same message began another response.", param="client_msg_id")
            )
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

    async def _carry_out(self, live: LiveTurn, begun: Begun, info: EngineInfo, place: Place | None) -> None:
        spec, writer = begun.spec, live.writer
        logger = LogWriter(self._store, live) if spec.store else None
        try:
            if spec.generate:
                writer.in_progress()
            outcome = await self._generate(live, begun, info)
            writer.finish(
                outcome.status,
                completed_at=now(),
                text=outcome.text,
                usage=usage(outcome.prompt, outcome.generated),
                incomplete_reason=outcome.incomplete_reason,
                error=outcome.error,
            )
            try:
                await self._commit(begun, writer, outcome)
            except SessionError as exc:
                self._admission.give_up(begun)
                writer.finish(
                    "failed",
                    completed_at=now(),
                    text=outcome.text,
                    usage=usage(outcome.prompt, outcome.generated),
                    error=_error_of(exc),
                )
            # Whoever reads the terminal event may go on at once: the turn can be named by now, and its place
            # is free before any reader runs.
            writer.emit()
        finally:
            if place is not None:
                place.leave()
            if logger is not None:
                await logger.finish()

    async def _generate(self, live: LiveTurn, begun: Begun, info: EngineInfo) -> Outcome:
        spec = begun.spec
        room = info.max_model_len - len(begun.prompt_ids)
        wanted = spec.sampling.max_tokens
        request = GenerateRequest(
            request_id=live.response_id,
            prompt_ids=begun.prompt_ids,
            # Stop strings are text, and text is ours.
            sampling=replace(
                spec.sampling, stop=(), max_tokens=max(1, room if wanted is None else min(wanted, room))
            ),
            tenant=spec.owner,
            branch=begun.record.branch,
            generate=spec.generate,
        )
        if not begun.prompt_ids:
            return Outcome("completed", "", tokens.ids(), _NOTHING, 0)
        generation = Generation(
            self._engine,
            request,
            stream=self._tokenizer.stream(spec.sampling.stop),
            end_ids={*info.eos_token_ids, *spec.sampling.stop_token_ids},
            writer=live.writer,
            cancelled=live.cancelled,
        )
        return await generation.run()

    async def _commit(self, begun: Begun, writer: TurnWriter, outcome: Outcome) -> None:
        """Keep the turn, or roll it back: a failed one is stored, and nothing goes on from it."""
        record, spec = begun.record, begun.spec
        record.response = writer.response
        record.output_ids = outcome.output_ids
        record.last_number = writer.terminal_number()
        failed = outcome.status == "failed"
        if spec.store and not await self._store.finish_turn(record, advance=not failed):
            failed = True  # it was deleted meanwhile
        if failed:
            self._admission.give_up(begun)
            return
        if outcome.text:
            self._planner.remember(spec.owner, begun.plan, outcome.text, outcome.output_ids)
        if spec.store or spec.scope is not None:
            self._registry.add(node_of(record, begun.parent, None if spec.store else spec.scope))

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


_NOTHING = PromptUsage(0, 0, 0)


def _fail(writer: TurnWriter, exc: SessionError) -> None:
    """End a turn that has not ended."""
    if not writer.log.closed:
        text = writer.log.text
        writer.finish("failed", completed_at=now(), text=text, usage=None, error=_error_of(exc))
        writer.emit()


def _error_of(exc: SessionError) -> dict[str, Any]:
    """In a response the protocol knows few codes; the message says the rest."""
    return {"code": "server_error" if exc.status >= 500 else "invalid_prompt", "message": exc.message}


def internal_error() -> SessionError:
    return SessionError(
        "Something went wrong on the server.", code="server_error", status=500, type="server_error"
    )


def now() -> int:
    return int(time.time())
