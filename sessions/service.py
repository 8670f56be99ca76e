"""Conversations and turns, as the front asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from engine.api import EngineClient, SamplingParams
from sessions import conversations as shapes
from sessions.admission import Duplicate, new_record
from sessions.api import Item, SessionError, TurnSpec
from sessions.branches import Branches
from sessions.execution import internal_error, now
from sessions.ids import new_id
from sessions.items import messages_of, stored_items
from sessions.live import LiveTurn
from sessions.lru import BoundedMap
from sessions.planner import Planner
from sessions.prompt import PromptBuilder, TemplateProof
from sessions.registry import Registry, node_of
from sessions.response import Response, new_response
from sessions.runner import PROGRESS_S, TurnRunner
from sessions.store import Store, TurnRecord
from sessions.stored import StoredTurn, settle_orphan
from sessions.tokenizer import ChatTokenizer

MESSAGE_IDS, MESSAGE_TTL_S = 16_384, 24 * 3600.0

Turn = LiveTurn | StoredTurn
"""A turn to watch: `response_id`, `conversation_id`, `events(starting_after)`, `cancel()`, `result()`."""


class Sessions:
    """Begins turns, finds them again, and keeps what they say.

    Raises `ValueError` for a tokenizer whose chat template cannot render a plain conversation.
    """

    def __init__(
        self, engine: EngineClient, tokenizer: ChatTokenizer, store: Store, *, progress_s: float = PROGRESS_S
    ) -> None:
        self._store = store
        self._builder = PromptBuilder(tokenizer)
        self._planner = Planner(self._builder)
        self._registry = Registry(store)
        self._branches = Branches(engine)
        self._runner = TurnRunner(
            engine, tokenizer, store, self._planner, self._registry, self._branches, progress_s=progress_s
        )
        self._messages: BoundedMap[tuple[str, str], str] = BoundedMap(MESSAGE_IDS, ttl_s=MESSAGE_TTL_S)
        self._beginning: dict[tuple[str, str], asyncio.Future[Turn]] = {}
        self._closing = False

    @property
    def template_proof(self) -> TemplateProof:
        """What was found out about the model's chat template."""
        return self._builder.proof

    @property
    def running(self) -> int:
        """Turns that are being written, or wait to be."""
        return len(self._runner.live)

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        """Cancel what runs, keeping what it has so far, and let go of the store. The engine stays."""
        self._closing = True
        await self._runner.end(list(self._runner.live.values()))
        await self._branches.close()
        await self._store.close()

    # Turns.

    async def begin(self, spec: TurnSpec) -> Turn:
        """Start a turn, which then runs by itself. Raises `SessionError` for one that cannot run.

        On a conversation that is being written it waits its turn; what goes wrong then is an event of the
        turn. A `client_msg_id` that was seen before gives the turn it began then.
        """
        if self._closing:
            raise SessionError(
                "The server is shutting down.", code="server_draining", status=503, type="server_error"
            )
        _check(spec)
        if spec.client_msg_id is None:
            return await self._begin(spec)
        key = (spec.owner, spec.client_msg_id)
        known = self._messages.get(key)
        if known is not None:
            return await self.attach(spec.owner, known, scope=spec.scope)
        beginning = self._beginning.get(key)
        if beginning is not None:
            begun = await asyncio.shield(beginning)
            return await self.attach(spec.owner, begun.response_id, scope=spec.scope)
        beginning = self._beginning[key] = asyncio.get_running_loop().create_future()
        try:
            turn = await self._begin(spec)
        except BaseException as exc:
            beginning.set_exception(exc if isinstance(exc, SessionError) else internal_error())
            beginning.exception()  # nobody may be waiting
            raise
        else:
            beginning.set_result(turn)
            self._messages.put(key, turn.response_id)
            return turn
        finally:
            del self._beginning[key]

    async def attach(self, owner: str, response_id: str, scope: str | None = None) -> Turn:
        """A turn to watch, running or not. Raises `SessionError` 404."""
        live = self._runner.live.get(response_id) or self._runner.recent.get(response_id)
        if live is not None and live.visible_to(owner, scope):
            return live
        return StoredTurn(self._store, await self._record(owner, response_id))

    async def cancel(self, owner: str, response_id: str, scope: str | None = None) -> None:
        """End a running turn within a step of the engine; what it has is kept and can be gone on from."""
        turn = await self.attach(owner, response_id, scope)
        over = turn.writer.log.closed if isinstance(turn, LiveTurn) else not turn.in_progress
        if over:
            raise SessionError(
                f"Response {response_id!r} has ended already.",
                code="response_not_active",
                param="response_id",
            )
        await turn.cancel()

    async def close_scope(self, scope: str) -> None:
        """A connection is gone: what only it could name ends and is forgotten."""
        await self._runner.end([live for live in self._runner.live.values() if live.scope == scope])
        for node in self._registry.close_scope(scope):
            self._branches.release_tip(node)

    async def response(self, owner: str, response_id: str) -> Response:
        """The response object as it is now. Raises `SessionError` 404."""
        live = self._runner.live.get(response_id)
        if live is not None and live.owner == owner and live.scope is None:
            return live.writer.response
        return (await self._record(owner, response_id)).response

    async def delete_response(self, owner: str, response_id: str) -> None:
        """Hide it from everybody; turns that go on from it keep its ids. Raises `SessionError` 404."""
        live = self._runner.live.get(response_id)
        if live is not None and live.visible_to(owner, None):
            await self._runner.end([live])
        record = await self._record(owner, response_id)
        if not await self._store.delete_turn(owner, response_id):
            raise _response_not_found(response_id)
        self._runner.recent.pop(response_id)
        self._branches.release_tip(self._registry.forget(response_id) or node_of(record, None))

    # Conversations.

    async def create_conversation(
        self, owner: str, metadata: dict[str, str] | None = None, items: Sequence[Item] = ()
    ) -> dict[str, Any]:
        """A new conversation, which may begin with items that need no answer."""
        said = stored_items(items, "items")
        record = await self._store.create_conversation(owner, metadata or {})
        if said:
            spec = TurnSpec(
                owner=owner,
                input=[],
                model="",
                sampling=SamplingParams(),
                conversation_id=record.id,
                generate=False,
            )
            response = new_response(new_id("resp"), spec, created_at=now(), status="in_progress")
            messages = messages_of(said)
            plan = await self._planner.plan(owner, None, messages, None, answer=False)
            turn = new_record(spec, response, plan, parent=None, items=said, branch=None)
            await self._store.begin_turn(turn)
            turn.response = response | {"status": "completed", "completed_at": now()}
            turn.last_number = 1
            await self._store.finish_turn(turn, advance=True)
        return await self.conversation(owner, record.id)

    async def conversation(self, owner: str, conversation_id: str) -> dict[str, Any]:
        """Raises `SessionError` 404."""
        record = await shapes.owned(self._store, owner, conversation_id)
        if record.active is not None and record.active not in self._runner.live:
            turn = await self._store.turn(record.active)
            if turn is not None and turn.orphaned:
                await settle_orphan(self._store, turn)
                record = await shapes.owned(self._store, owner, conversation_id)
        return shapes.conversation_object(record)

    async def conversations(
        self, owner: str, *, limit: int = 20, after: str | None = None
    ) -> list[dict[str, Any]]:
        """The owner's conversations, newest first, from the one after `after` on."""
        page = await self._store.conversations(owner, after=after, limit=limit)
        return [shapes.conversation_object(record) for record in page.conversations]

    async def conversation_items(
        self,
        owner: str,
        conversation_id: str,
        *,
        limit: int = 20,
        after: str | None = None,
        order: str = "desc",
    ) -> list[Item]:
        """What was said on the path to the newest turn, the input of a running one included."""
        conversation = await self.conversation(owner, conversation_id)
        newest = conversation["active_response"] or conversation["last_response"]
        chain = await self._store.chain(newest) if newest is not None else []
        return shapes.slice_of(shapes.items_of(chain), after=after, limit=limit, order=order)

    async def update_conversation(
        self, owner: str, conversation_id: str, metadata: dict[str, str], *, rev: int | None = None
    ) -> dict[str, Any]:
        """Replace the metadata; its `title` is what people see. Raises `SessionError` 409: old `rev`."""
        outcome = await self._store.update_conversation(owner, conversation_id, metadata, rev=rev)
        if outcome.kind == "missing":
            raise shapes.conversation_not_found(conversation_id)
        if outcome.kind == "conflict":
            raise SessionError(
                f"rev is {outcome.rev} by now, not {rev}: read the conversation again.",
                code="conversation_changed",
                status=409,
                param="rev",
            )
        return await self.conversation(owner, conversation_id)

    async def delete_conversation(self, owner: str, conversation_id: str) -> None:
        """Delete it with all its turns, and give its KV back. Raises `SessionError` 404."""
        await shapes.owned(self._store, owner, conversation_id)
        running = [live for live in self._runner.live.values() if live.conversation_id == conversation_id]
        await self._runner.end(running)
        turns = await self._store.delete_conversation(owner, conversation_id)
        for name in (conversation_id, *(turns or ())):
            self._runner.recent.pop(name)
            self._registry.forget(name)
            self._branches.release(owner, name)

    async def _begin(self, spec: TurnSpec) -> Turn:
        try:
            return await self._runner.begin(spec)
        except Duplicate as duplicate:
            return await self.attach(spec.owner, duplicate.response_id)

    async def _record(self, owner: str, response_id: str) -> TurnRecord:
        record = await self._store.turn(response_id)
        if record is None or record.owner != owner or record.deleted:
            raise _response_not_found(response_id)
        if record.orphaned and response_id not in self._runner.live:
            record = await settle_orphan(self._store, record)
        return record


def _check(spec: TurnSpec) -> None:
    if spec.conversation_id is not None and spec.previous_response_id is not None:
        raise SessionError(
            "conversation and previous_response_id exclude each other: send one of them",
            param="previous_response_id",
        )
    if spec.conversation_id is not None and not spec.store:
        raise SessionError("store must be true in a conversation: it keeps what is said in it", param="store")


def _response_not_found(response_id: str) -> SessionError:
    return SessionError(
        f"Response with id {response_id!r} not found.",
        code="response_not_found",
        status=404,
        param="response_id",
    )
