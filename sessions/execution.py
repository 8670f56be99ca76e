"""One admitted turn: generation, commit or roll-back, terminal event."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from engine.api import EngineClient, EngineInfo, GenerateRequest, PromptUsage
from sessions import tokens
from sessions.admission import Admission, Begun
from sessions.api import SessionError
from sessions.generation import Generation, Outcome
from sessions.lanes import Place
from sessions.live import LiveTurn
from sessions.logwriter import LogWriter
from sessions.planner import Planner
from sessions.registry import Registry, node_of
from sessions.response import usage
from sessions.store import Store
from sessions.tokenizer import ChatTokenizer
from sessions.turn import TurnWriter

NOTHING = PromptUsage(0, 0, 0)


class Execution:
    """Carries out turns that were admitted, each in the task of its caller."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ChatTokenizer,
        store: Store,
        planner: Planner,
        registry: Registry,
        admission: Admission,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._store = store
        self._planner = planner
        self._registry = registry
        self._admission = admission

    async def carry_out(self, live: LiveTurn, begun: Begun, info: EngineInfo, place: Place | None) -> None:
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
            return Outcome("completed", "", tokens.ids(), NOTHING, 0)
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


def fail(writer: TurnWriter, exc: SessionError) -> None:
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
