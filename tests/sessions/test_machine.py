"""Any order of beginning, forking, cancelling, deleting and restarting, against a model that is a few dicts.

The model knows for every turn which texts came before it. The prompt the engine was asked with must say
exactly that, and must begin with the ids of the parent's prompt and answer, whatever was deleted or restarted
in between.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from engine.api import GenerateRequest
from sessions import LiveTurn, RedisStore, Sessions
from sessions.api import SessionError, TurnSpec
from tests.sessions.asking import toy_text
from tests.sessions.support import ScriptedEngine, ids_of, spec, text_in, text_of, toy_tokenizer, until, watch
from tests.sessions.test_eventlog import merged

_runs = itertools.count()


@dataclass
class Known:
    """What the model holds of a turn: the conversation so far as text, and the ids it must begin with."""

    name: str
    transcript: str
    ids: list[int]
    parent: Known | None
    scope: str | None = None
    deleted: bool = False


@dataclass
class KnownConversation:
    name: str
    leaf: Known | None = None
    turns: list[Known] = field(default_factory=list)
    deleted: bool = False

    def visible_leaf(self) -> Known | None:
        """Where it goes on: a turn that was deleted makes room for the one before it."""
        while self.leaf is not None and self.leaf.deleted:
            self.leaf = self.leaf.parent
        return self.leaf


class Tree(RuleBasedStateMachine):
    url = ""

    turns: Bundle[Known] = Bundle("turns")
    conversations: Bundle[KnownConversation] = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.prefix = f"machine{next(_runs)}:"
        self.answers = itertools.count()
        self.answer = ""
        self.scoped: dict[str, list[Known]] = {}
        self.engine = ScriptedEngine(self.script)
        self.sessions = self.open()

    def teardown(self) -> None:
        self.engine.resume()
        self.run(self.sessions.close())
        self.loop.close()

    def run(self, work: Any) -> Any:
        return self.loop.run(work)

    def open(self) -> Sessions:
        async def start() -> Sessions:
            store = RedisStore(self.url, prefix=self.prefix, exclusive=True)
            sessions = Sessions(self.engine, toy_tokenizer(), store)
            await sessions.start()
            return sessions

        opened: Sessions = self.run(start())
        return opened

    def script(self, request: GenerateRequest) -> list[int]:
        return [*ids_of(self.answer), 2]

    # What happens.

    @rule(target=conversations)
    def create_conversation(self) -> KnownConversation:
        return KnownConversation(self.run(self.sessions.create_conversation("ann"))["id"])

    @rule(
        target=turns,
        parent=st.one_of(st.none(), turns),
        scope=st.sampled_from([None, "one", "two"]),
        cut=st.sampled_from(["end", "limit", "stop", "cancel"]),
    )
    def take_turn(self, parent: Known | None, scope: str | None, cut: str) -> Any:
        fields: dict[str, Any] = {"store": scope is None, "scope": scope}
        if parent is not None:
            fields["previous_response_id"] = parent.name
            allowed = not parent.deleted and parent.scope in (None, scope)
            if not allowed:
                with pytest.raises(SessionError) as refused:
                    self.run(self.sessions.begin(spec(**fields)))
                assert refused.value.code in ("previous_response_not_found", "invalid_request")
                return multiple()
        return self.play(parent, cut, **fields)

    @rule(conversation=conversations, cut=st.sampled_from(["end", "limit", "cancel"]), target=turns)
    def take_turn_in_conversation(self, conversation: KnownConversation, cut: str) -> Any:
        if conversation.deleted:
            with pytest.raises(SessionError) as refused:
                self.run(self.sessions.begin(spec(conversation_id=conversation.name)))
            assert refused.value.status == 404
            return multiple()
        turn = self.play(conversation.visible_leaf(), cut, conversation_id=conversation.name)
        conversation.leaf = turn
        conversation.turns.append(turn)
        return turn

    def play(self, parent: Known | None, cut: str, **fields: Any) -> Known:
        number = next(self.answers)
        self.answer = f"answer{number}"
        question = f"q{number}"
        if cut == "limit":
            kept = self.answer[:3]
            sampling: dict[str, Any] = {"max_tokens": 3}
        elif cut == "stop":
            kept, sampling = "ans", {"max_tokens": 99, "stop": ("wer",)}
        else:
            kept, sampling = self.answer, {"max_tokens": 99}
        turn_spec = spec(question, **fields)
        turn_spec = TurnSpec(**{**as_fields(turn_spec), "sampling": type(turn_spec.sampling)(**sampling)})
        if cut == "cancel":
            kept = "an"
            response = self.run(self.cancelled_after(turn_spec, 2))
        else:
            response = self.run(self.finished(turn_spec))
        assert text_of(response) == kept
        request = self.engine.requests[-1]
        before = parent.transcript if parent is not None else "<s>system\nYou help.<e>\n"
        transcript = f"{before}<s>user\n{question}<e>\n<s>assistant\n"
        assert toy_text(request) == transcript
        if parent is not None:
            assert request.prompt_ids[: len(parent.ids)] == parent.ids
        known = Known(
            response["id"],
            f"{transcript}{kept}<e>\n",
            request.prompt_ids + ids_of(kept),
            parent,
            scope=fields.get("scope"),
        )
        if known.scope is not None:
            self.scoped.setdefault(known.scope, []).append(known)
        return known

    async def finished(self, turn_spec: TurnSpec) -> dict[str, Any]:
        """Watched from the start and from somewhere in between, with the same story."""
        turn = await self.sessions.begin(turn_spec)
        whole, part = await asyncio.gather(watch(turn), watch(turn, starting_after=4))
        assert merged(whole)[-4:] == merged(part)[-4:]
        assert [event for event in part if event["sequence_number"] <= 4] == []
        response: dict[str, Any] = whole[-1]["response"]
        assert text_in(whole) == text_of(response)
        return response

    async def cancelled_after(self, turn_spec: TurnSpec, tokens: int) -> dict[str, Any]:
        self.engine.pause()
        turn = await self.sessions.begin(turn_spec)
        assert isinstance(turn, LiveTurn)
        self.engine.step(tokens)
        await until(lambda: len(turn.writer.log.text) == tokens)
        await turn.cancel()
        response = await turn.result()
        self.engine.resume()
        assert response["status"] == "cancelled"
        return response

    @rule(turn=turns)
    def delete_turn(self, turn: Known) -> None:
        if turn.deleted or turn.scope is not None:
            with pytest.raises(SessionError) as refused:
                self.run(self.sessions.delete_response("ann", turn.name))
            assert refused.value.status == 404
            return
        self.run(self.sessions.delete_response("ann", turn.name))
        turn.deleted = True

    @rule(conversation=consumes(conversations))
    def delete_conversation(self, conversation: KnownConversation) -> None:
        self.run(self.sessions.delete_conversation("ann", conversation.name))
        conversation.deleted = True
        for turn in conversation.turns:
            turn.deleted = True

    @rule(conversation=conversations)
    def read_conversation(self, conversation: KnownConversation) -> None:
        leaf = conversation.visible_leaf()
        shown = self.run(self.sessions.conversation("ann", conversation.name))
        assert shown["last_response"] == (leaf.name if leaf is not None else None)
        items = self.run(self.sessions.conversation_items("ann", conversation.name, order="asc", limit=1000))
        path = []
        while leaf is not None:
            path += [leaf.name] if not leaf.deleted else []
            leaf = leaf.parent
        assert list(dict.fromkeys(item["response_id"] for item in items)) == path[::-1]

    @rule(turn=turns)
    def read_turn(self, turn: Known) -> None:
        if turn.deleted or turn.scope is not None:
            with pytest.raises(SessionError):
                self.run(self.sessions.response("ann", turn.name))
        else:
            response = self.run(self.sessions.response("ann", turn.name))
            assert f"{text_of(response)}<e>\n" == turn.transcript.rpartition("<s>assistant\n")[2]

    @rule(scope=st.sampled_from(["one", "two"]))
    def close_scope(self, scope: str) -> None:
        self.run(self.sessions.close_scope(scope))
        self.forget_scope(scope)

    @rule()
    def restart(self) -> None:
        self.run(self.sessions.close())
        self.forget_scope("one")
        self.forget_scope("two")
        self.sessions = self.open()

    def forget_scope(self, scope: str) -> None:
        for turn in self.scoped.pop(scope, []):
            turn.deleted = True

    @invariant()
    def nothing_is_left_running(self) -> None:
        assert not self.engine.running


def as_fields(turn_spec: TurnSpec) -> dict[str, Any]:
    return {name: getattr(turn_spec, name) for name in TurnSpec.__dataclass_fields__}


def test_any_order_of_things_keeps_every_history_exact(valkey_url: str) -> None:
    machine = type("TreeOnValkey", (Tree,), {"url": valkey_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
