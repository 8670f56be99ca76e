"""Conversations: one writer each, a leaf that moves, and a list of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.conversations import Conversation as OfficialConversation
from openai.types.conversations import ConversationItem as OfficialItem
from pydantic import TypeAdapter

from sessions import LiveTurn, Sessions
from sessions.api import SessionError
from sessions.lanes import MAX_WAITING
from tests.sessions.asking import refused, toy_text
from tests.sessions.conftest import NewSessions
from tests.sessions.support import (
    ScriptedEngine,
    finished,
    said,
    says,
    spec,
    text_in,
    text_of,
    until,
    watch,
)
from tests.sessions.test_turn import check_strictly

pytestmark = pytest.mark.anyio


async def new(sessions: Sessions, owner: str = "ann", **fields: Any) -> str:
    name: str = (await sessions.create_conversation(owner, **fields))["id"]
    return name


def texts(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(item["role"], "".join(part["text"] for part in item["content"])) for item in items]


async def test_turns_of_a_conversation_follow_each_other(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.script = says("one", "two")
    name = await new(sessions)
    first = await finished(sessions, spec("a", conversation_id=name))
    second = await finished(sessions, spec("b", conversation_id=name))
    assert first["conversation"] == second["conversation"] == {"id": name}
    assert second["previous_response_id"] is None
    assert (
        engine.requests[1].prompt_ids[: len(engine.requests[0].prompt_ids)] == engine.requests[0].prompt_ids
    )
    assert [request.branch for request in engine.requests] == [name, name]
    conversation = await sessions.conversation("ann", name)
    OfficialConversation.model_validate(conversation)
    assert conversation["last_response"] == second["id"]
    assert conversation["active_response"] is None


async def test_its_items_are_what_was_said_in_either_order(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("one", "two")
    name = await new(sessions, items=[said("system", "Be brief."), said("assistant", "Hi!")])
    for question in "ab":
        await finished(sessions, spec(question, conversation_id=name))
    expected = [
        ("system", "Be brief."),
        ("assistant", "Hi!"),
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
        ("assistant", "two"),
    ]
    items = await sessions.conversation_items("ann", name, order="asc")
    assert texts(items) == expected
    for item in items:
        TypeAdapter(OfficialItem).validate_python(item)
    assert len({item["id"] for item in items}) == len(items)
    assert await sessions.conversation_items("ann", name) == items[::-1]
    assert (
        await sessions.conversation_items("ann", name, order="asc", after=items[1]["id"], limit=2)
        == items[2:4]
    )
    error = await refused(sessions.conversation_items("ann", name, after="msg_missing"))
    assert error.param == "after"
    assert toy_text(engine.requests[0]) == (
        "<s>system\nBe brief.<e>\n<s>assistant\nHi!<e>\n<s>user\na<e>\n<s>assistant\n"
    )


async def test_a_running_turn_shows_its_question_and_that_it_runs(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    name = await new(sessions)
    await finished(sessions, spec("a", conversation_id=name))
    engine.pause()
    turn = await sessions.begin(spec("b", conversation_id=name))
    assert (await sessions.conversation("ann", name))["active_response"] == turn.response_id
    items = await sessions.conversation_items("ann", name, order="asc")
    assert texts(items) == [("user", "a"), ("assistant", "ok"), ("user", "b")]
    assert items[-1]["response_id"] == turn.response_id


async def test_a_second_turn_waits_for_the_first_and_goes_on_from_it(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("one", "two", "three")
    engine.pause()
    name = await new(sessions)
    turns = [await sessions.begin(spec(question, conversation_id=name)) for question in "abc"]
    assert len(engine.running) <= 1
    watching = [asyncio.create_task(watch(turn)) for turn in turns]
    engine.resume()
    stories = await asyncio.gather(*watching)
    for events, answer in zip(stories, ("one", "two", "three"), strict=True):
        check_strictly(events)
        assert text_in(events) == answer
    assert [event["type"] for event in stories[1][:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert stories[1][0]["response"]["status"] == "queued"
    assert toy_text(engine.requests[2]).endswith("two<e>\n<s>user\nc<e>\n<s>assistant\n")


async def test_a_waiting_turn_can_be_cancelled(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    name = await new(sessions)
    first = await sessions.begin(spec("a", conversation_id=name))
    waiting = await sessions.begin(spec("b", conversation_id=name))
    third = await sessions.begin(spec("c", conversation_id=name))
    await sessions.cancel("ann", waiting.response_id)
    events = await watch(waiting)
    check_strictly(events)
    assert events[-1]["response"]["status"] == "cancelled"
    engine.resume()
    assert (await first.result())["status"] == (await third.result())["status"] == "completed"
    assert "b<e>" not in toy_text(engine.requests[-1])


async def test_what_goes_wrong_with_a_waiting_turn_is_an_event_of_it(new_sessions: NewSessions) -> None:
    engine = ScriptedEngine(max_model_len=100)
    sessions = await new_sessions(engine)
    engine.pause()
    name = await new(sessions)
    first = await sessions.begin(spec("a", conversation_id=name))
    waiting = await sessions.begin(spec("b" * 200, conversation_id=name))
    engine.resume()
    events = await watch(waiting)
    check_strictly(events)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
    assert "100" in events[-1]["response"]["error"]["message"]
    await first.result()
    assert (await finished(sessions, spec("c", conversation_id=name)))["status"] == "completed"


async def test_only_so_many_turns_may_wait(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    name = await new(sessions)
    for _ in range(1 + MAX_WAITING):
        await sessions.begin(spec(conversation_id=name))
    error = await refused(sessions.begin(spec(conversation_id=name)))
    assert (error.code, error.status) == ("conversation_queue_full", 429)


async def test_a_turn_that_ended_lets_the_next_one_begin_at_once(sessions: Sessions) -> None:
    name = await new(sessions)
    for _ in range(5):
        turn = await sessions.begin(spec(conversation_id=name))
        events = await watch(turn)
        assert not any(event["type"] == "response.queued" for event in events)


async def test_a_failed_turn_is_rolled_back(sessions: Sessions, engine: ScriptedEngine) -> None:
    name = await new(sessions)
    good = await finished(sessions, spec("a", conversation_id=name))
    engine.pause()
    turn = await sessions.begin(spec("b", conversation_id=name))
    engine.step(1)
    await until(lambda: isinstance(turn, LiveTurn) and turn.writer.opened)
    engine.die()
    assert (await turn.result())["status"] == "failed"
    engine.revive()
    engine.resume()
    assert (await sessions.conversation("ann", name))["last_response"] == good["id"]
    await finished(sessions, spec("c", conversation_id=name))
    assert "b<e>" not in toy_text(engine.requests[-1])
    assert (await sessions.response("ann", turn.response_id))["status"] == "failed"


async def test_a_cancelled_turn_is_gone_on_from(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.script = says("abcdef")
    engine.pause()
    name = await new(sessions)
    turn = await sessions.begin(spec("q", conversation_id=name))
    engine.step(2)
    await until(lambda: isinstance(turn, LiveTurn) and turn.writer.log.text == "ab")
    await turn.cancel()
    await turn.result()
    engine.resume()
    await finished(sessions, spec("r", conversation_id=name))
    assert "<s>assistant\nab<e>\n<s>user\nr<e>" in toy_text(engine.requests[-1])


async def test_a_turn_outside_may_fork_from_a_turn_inside(sessions: Sessions, engine: ScriptedEngine) -> None:
    name = await new(sessions)
    inside = await finished(sessions, spec("a", conversation_id=name))
    fork = await finished(sessions, spec("b", previous_response_id=inside["id"]))
    assert (await sessions.conversation("ann", name))["last_response"] == inside["id"]
    await sessions.delete_conversation("ann", name)
    assert (await refused(sessions.response("ann", inside["id"]))).status == 404
    after = await finished(sessions, spec("c", previous_response_id=fork["id"]))
    assert after["status"] == "completed"
    assert toy_text(engine.requests[-1]).count("<s>user") == 3


async def test_the_newest_activity_comes_first_and_pages_join_up(sessions: Sessions) -> None:
    names = []
    for number in range(5):
        names.append(await new(sessions, metadata={"title": str(number)}))
        await asyncio.sleep(0.002)  # the order is one of milliseconds
    await new(sessions, "bob")
    await finished(sessions, spec(conversation_id=names[1]))
    expected = [names[1], names[4], names[3], names[2], names[0]]
    listed = await sessions.conversations("ann")
    assert [one["id"] for one in listed] == expected
    assert listed[1]["metadata"] == {"title": "4"}
    page = await sessions.conversations("ann", limit=2, after=expected[1])
    assert [one["id"] for one in page] == expected[2:4]
    assert await sessions.conversations("ann", after=expected[-1]) == []


async def test_renaming_checks_the_revision_when_one_is_given(sessions: Sessions) -> None:
    name = await new(sessions, metadata={"title": "old"})
    rev = (await sessions.conversation("ann", name))["rev"]
    renamed = await sessions.update_conversation("ann", name, {"title": "new"}, rev=rev)
    assert renamed["metadata"] == {"title": "new"}
    assert renamed["rev"] == rev + 1
    error = await refused(sessions.update_conversation("ann", name, {"title": "late"}, rev=rev))
    assert (error.status, error.code, error.param) == (409, "conversation_changed", "rev")
    assert str(rev + 1) in error.message
    assert (await sessions.update_conversation("ann", name, {"title": "x"}))["metadata"] == {"title": "x"}


async def test_deleting_ends_what_runs_and_releases_every_branch(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    name = await new(sessions)
    first = await finished(sessions, spec("a", conversation_id=name))
    await finished(sessions, spec("b", conversation_id=name))
    fork = await finished(sessions, spec("f", previous_response_id=first["id"]))
    engine.pause()
    running = await sessions.begin(spec("c", conversation_id=name))
    await sessions.delete_conversation("ann", name)
    assert not engine.running
    assert (await refused(sessions.conversation("ann", name))).status == 404
    assert (await refused(sessions.response("ann", running.response_id))).status == 404
    assert await sessions.conversations("ann") == []
    await until(lambda: engine.released)
    assert engine.released == [("ann", name)]
    assert (await sessions.response("ann", fork["id"]))["status"] == "completed"


async def test_deleting_the_newest_turn_takes_the_conversation_back_to_the_one_before(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    name = await new(sessions)
    first = await finished(sessions, spec("a", conversation_id=name))
    second = await finished(sessions, spec("b", conversation_id=name))
    await sessions.delete_response("ann", second["id"])
    assert (await sessions.conversation("ann", name))["last_response"] == first["id"]
    await finished(sessions, spec("c", conversation_id=name))
    assert "b<e>" not in toy_text(engine.requests[-1])


async def test_nobody_reaches_the_conversation_of_another(sessions: Sessions) -> None:
    name = await new(sessions)
    attempts = [
        sessions.conversation("eve", name),
        sessions.conversation_items("eve", name),
        sessions.update_conversation("eve", name, {}),
        sessions.delete_conversation("eve", name),
        sessions.begin(spec(owner="eve", conversation_id=name)),
        sessions.conversation("ann", "conv_missing"),
    ]
    for attempt in attempts:
        error = await refused(attempt)
        assert (error.status, error.code) == (404, "conversation_not_found")


async def test_lanes_do_not_outlive_their_turns(sessions: Sessions) -> None:
    name = await new(sessions)
    turns = [await sessions.begin(spec(conversation_id=name)) for _ in range(4)]
    await asyncio.gather(*(turn.result() for turn in turns))
    await until(lambda: sessions.running == 0)
    assert len(sessions._runner._lanes) == 0


# Several processes on one store.


async def test_a_turn_waits_for_one_that_another_process_writes(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    here, there = await new_sessions(), await new_sessions(ScriptedEngine(says("two")))
    engine.pause()
    name = await new(here)
    first = await here.begin(spec("a", conversation_id=name))
    second = await there.begin(spec("b", conversation_id=name))
    assert isinstance(second, LiveTurn)
    assert second.writer.status == "queued"
    engine.resume()
    assert text_of(await second.result()) == "two"
    assert (await here.conversation("ann", name))["last_response"] == second.response_id
    await first.result()
    third = await finished(here, spec("c", conversation_id=name))
    assert third["status"] == "completed"
    assert toy_text(engine.requests[-1]).count("<s>user") == 3


async def test_a_turn_of_another_process_can_be_followed_and_cancelled(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    here, there = await new_sessions(), await new_sessions(ScriptedEngine())
    engine.script = says("abcdef")
    engine.pause()
    turn = await here.begin(spec())
    engine.step(2)
    followed = await there.attach("ann", turn.response_id)
    seen = []
    async for event in followed.events():
        seen.append(event)
        if event["type"] == "response.output_text.delta":
            await there.cancel("ann", turn.response_id)
    check_strictly(seen)
    assert text_in(seen) == "ab"
    assert seen[-1]["response"]["status"] == "cancelled"
    assert seen[-1] == (await watch(turn))[-1]
    assert (await followed.result())["status"] == "cancelled"


async def test_a_turn_whose_log_is_gone_cannot_be_followed_from_before(
    new_sessions: NewSessions, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = await new_sessions(), await new_sessions(ScriptedEngine())
    engine.pause()
    turn = await here.begin(spec())

    async def forgetful(response_id: str, after: int) -> None:
        return None

    monkeypatch.setattr(there._store, "read_log", forgetful)
    with pytest.raises(SessionError) as error:
        await watch(await there.attach("ann", turn.response_id))
    assert error.value.code == "not_resumable"
