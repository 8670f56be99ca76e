"""Whether a turn may run, and with what prompt: its parent, its ids, its place in tree and store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.api import EngineInfo
from sessions import tokens
from sessions.api import Item, SessionError, TurnSpec
from sessions.branches import Branches
from sessions.conversations import conversation_not_found, owned
from sessions.items import messages_of
from sessions.live import LiveTurn
from sessions.planner import Plan, Planner
from sessions.registry import Registry, previous_in_progress, previous_not_found
from sessions.response import Response
from sessions.store import Store, TurnRecord
from sessions.tree import TurnNode


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that may start: its prompt is built, its record is stored."""

    spec: TurnSpec
    plan: Plan
    parent: TurnNode | None
    record: TurnRecord
    prompt_ids: list[int]


class Busy(Exception):
    """Another process writes in this conversation."""


class Duplicate(Exception):
    """The client message began another turn before."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id


class Admission:
    """Prepares turns. `live` are those that run now: nothing can go on from them yet."""

    def __init__(
        self,
        store: Store,
        planner: Planner,
        registry: Registry,
        branches: Branches,
        live: Mapping[str, LiveTurn],
    ) -> None:
        self._store = store
        self._planner = planner
        self._registry = registry
        self._branches = branches
        self._live = live

    async def prepare(self, spec: TurnSpec, items: list[Item], response: Response, info: EngineInfo) -> Begun:
        """Build the prompt and store the turn. Raises `SessionError`, `Busy` or `Duplicate`."""
        while True:
            parent = await self._parent(spec)
            plan = await self._planner.plan(
                spec.owner, parent, messages_of(items), spec.instructions, answer=spec.generate
            )
            prompt_ids = plan.prompt_ids()
            _check_length(len(prompt_ids), info.max_model_len, spec)
            branch = self._take_branch(spec, parent, response["id"])
            record = new_record(spec, response, plan, parent=parent, items=items, branch=branch)
            begun = Begun(spec, plan, parent, record, prompt_ids)
            if not spec.store:
                return begun
            try:
                outcome = await self._store.begin_turn(record, client_msg_id=spec.client_msg_id)
                if outcome.kind == "begun":
                    return begun
            except BaseException:
                self.give_up(begun)
                raise
            self.give_up(begun)
            if outcome.kind == "duplicate":
                raise Duplicate(outcome.response_id or "")
            if outcome.kind == "busy":
                raise Busy
            if outcome.kind == "no_conversation":
                raise conversation_not_found(spec.conversation_id or "")
            if outcome.kind == "no_parent":
                self._registry.forget(record.parent_id or "")
                if spec.conversation_id is None:
                    raise previous_not_found(record.parent_id or "")
            # The conversation moved on while the prompt was built: build it again.

    async def _parent(self, spec: TurnSpec) -> TurnNode | None:
        if spec.conversation_id is not None:
            conversation = await owned(self._store, spec.owner, spec.conversation_id)
            if conversation.leaf is None:
                return None
            return await self._registry.find(spec.owner, conversation.leaf, None)
        name = spec.previous_response_id
        if name is None:
            return None
        live = self._live.get(name)
        if live is not None and live.visible_to(spec.owner, spec.scope) and not live.writer.log.closed:
            raise previous_in_progress(name)
        parent = await self._registry.find(spec.owner, name, spec.scope)
        if parent.scope is not None and spec.store:
            raise SessionError(
                "store must be false: a response that was not stored can only be followed by such ones.",
                param="store",
            )
        return parent

    def _take_branch(self, spec: TurnSpec, parent: TurnNode | None, response_id: str) -> str | None:
        if parent is None and not spec.store:
            # It may be a client that sends its whole history each time. Without a name its KV is found by its
            # tokens and goes when the room is needed; with one it would go with the connection.
            return None
        new_name = spec.conversation_id if parent is None and spec.conversation_id else response_id
        return self._branches.take(spec.owner, parent, response_id, new_name)

    def give_up(self, begun: Begun) -> None:
        """The turn came to nothing: the engine's branch is its parent's again."""
        if begun.record.branch is not None:
            self._branches.give_up(begun.spec.owner, begun.record.branch, begun.parent)


def new_record(
    spec: TurnSpec,
    response: Response,
    plan: Plan,
    *,
    parent: TurnNode | None,
    items: list[Item],
    branch: str | None,
) -> TurnRecord:
    return TurnRecord(
        id=response["id"],
        owner=spec.owner,
        parent_id=parent.id if parent is not None else None,
        conversation_id=spec.conversation_id,
        generate=spec.generate,
        branch=branch,
        instructions=spec.instructions,
        input=items,
        messages=plan.messages,
        segment=plan.segment,
        output_ids=tokens.ids(),
        response=response,
    )


def check_characters(items: Sequence[Item], instructions: str | None, limit: int, longest_token: int) -> None:
    """Refuse at once what could not fit however it is encoded: encoding megabytes takes seconds."""
    characters = len(instructions or "") + sum(len(message.content) for message in messages_of(items))
    if characters > limit * longest_token:
        raise SessionError(
            f"input is too long: {characters} characters cannot fit into the model's context"
            f" of {limit} tokens.",
            code="context_length_exceeded",
            param="input",
        )


def _check_length(prompt: int, limit: int, spec: TurnSpec) -> None:
    room_for_answer = 1 if spec.generate else 0
    if prompt + room_for_answer > limit:
        raise SessionError(
            f"input is too long: with the conversation so far it is {prompt} tokens, and the model's context"
            f" holds {limit}" + (", at least one of them for the answer." if spec.generate else "."),
            code="context_length_exceeded",
            param="input",
        )
