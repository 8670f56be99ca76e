"""A new process over the same store goes on where the old one was, to the token."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from sessions import LiveTurn, RedisStore, Sessions, StoredTurn
from sessions.store import StoreUnavailable
from tests.sessions.asking import refused, toy_text
from tests.sessions.conftest import NewSessions, NewStore
from tests.sessions.support import (
    ScriptedEngine,
    default_tokenizer,
    finished,
    ids_of,
    says,
    spec,
    text_in,
    text_of,
    until,
    watch,
)
from tests.sessions.test_eventlog import merged
from tests.sessions.test_turn import check_strictly

pytestmark = pytest.mark.anyio


async def kill(sessions: Sessions, store: RedisStore, valkey_url: str) -> None:
    """As if the process had died: its turns stop where they are, and its sign of life goes out."""
    for task in list(sessions._runner._tasks):
        task.cancel()
    async with Redis.from_url(valkey_url) as redis:
        await redis.delete(f"{store._prefix}worker:{store._worker}")


async def test_a_conversation_goes_on_with_its_exact_ids(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    tokenizer = default_tokenizer()
    letters = [token for letter in "hello there" for token in tokenizer.encode_text(letter)]
    engine.script = lambda request: [*letters, 2]
    old = await new_sessions(tokenizer=tokenizer)
    name = (await old.create_conversation("ann"))["id"]
    for question in "ab":
        await finished(old, spec(question, conversation_id=name, instructions="Be brief."))
    fork = await finished(
        old, spec("f", previous_response_id=await leaf(old, name), instructions="Be brief.")
    )
    after_restart = ScriptedEngine(engine.script)
    new = await new_sessions(after_restart, tokenizer=tokenizer)
    await finished(new, spec("c", conversation_id=name, instructions="Be brief."))
    known = engine.requests[1].prompt_ids + letters
    assert after_restart.requests[0].prompt_ids[: len(known)] == known
    await finished(new, spec("g", previous_response_id=fork["id"], instructions="Be brief."))
    known = engine.requests[2].prompt_ids + letters
    assert after_restart.requests[1].prompt_ids[: len(known)] == known
    assert len(await new.conversation_items("ann", name)) == 6


async def leaf(sessions: Sessions, name: str) -> Any:
    return (await sessions.conversation("ann", name))["last_response"]


async def test_a_warm_up_is_still_pending(new_sessions: NewSessions, engine: ScriptedEngine) -> None:
    old = await new_sessions()
    root = await finished(old, spec("a"))
    warm = await finished(old, spec("b", generate=False, previous_response_id=root["id"]))
    fresh = ScriptedEngine()
    new = await new_sessions(fresh)
    await finished(new, spec("c", previous_response_id=warm["id"]))
    assert toy_text(fresh.requests[0]).endswith("ok<e>\n<s>user\nb<e>\n<s>user\nc<e>\n<s>assistant\n")


async def test_changed_instructions_are_set_before_what_was_stored(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    old = await new_sessions()
    first = await finished(old, spec("a", instructions="Rhyme."))
    second = await finished(old, spec("b", instructions="Rhyme.", previous_response_id=first["id"]))
    await old.delete_response("ann", first["id"])
    fresh = ScriptedEngine()
    new = await new_sessions(fresh)
    await finished(new, spec("c", instructions="Sing.", previous_response_id=second["id"]))
    assert toy_text(fresh.requests[0]).startswith("<s>system\nSing.<e>\n<s>user\na<e>\n<s>assistant\nok<e>")


async def test_the_same_client_message_still_begins_no_second_turn(new_sessions: NewSessions) -> None:
    old = await new_sessions()
    first = await finished(old, spec(client_msg_id="m1"))
    fresh = ScriptedEngine()
    new = await new_sessions(fresh)
    again = await new.begin(spec(client_msg_id="m1"))
    assert isinstance(again, StoredTurn)
    assert again.response_id == first["id"]
    assert not fresh.requests


async def test_a_finished_turn_is_told_again_when_its_log_is_gone(
    new_sessions: NewSessions, new_store: NewStore, valkey_url: str, engine: ScriptedEngine
) -> None:
    engine.script = says("abcdef")
    old = await new_sessions()
    turn = await old.begin(spec())
    events = merged(await watch(turn))
    await until(lambda: old.running == 0)
    new = await new_sessions(ScriptedEngine())
    assert await watch(await new.attach("ann", turn.response_id), 6) == merged(events_after(events, 6))
    async with Redis.from_url(valkey_url) as redis:
        assert await redis.delete(f"{new_store()._prefix}log:{turn.response_id}") == 1
    stored = await new.attach("ann", turn.response_id)
    told = await watch(stored)
    check_strictly(told)
    assert text_in(told) == "abcdef"
    assert told[-6:] == events[-6:] or told[-5:] == events[-5:]
    # One who was in the middle of the text gets the end, which has all of it.
    assert await watch(stored, 6) == events[-1:]
    assert await watch(stored, events[-1]["sequence_number"]) == []


async def test_a_log_that_lacks_its_end_is_not_taken_for_the_whole(
    new_sessions: NewSessions, new_store: NewStore, valkey_url: str
) -> None:
    old = await new_sessions()
    turn = await old.begin(spec())
    events = merged(await watch(turn))
    await until(lambda: old.running == 0)
    async with Redis.from_url(valkey_url) as redis:
        key = f"{new_store()._prefix}log:{turn.response_id}"
        [entry] = await redis.xrevrange(key, count=1) or []
        await redis.xdel(key, entry[0] or b"")
    new = await new_sessions(ScriptedEngine())
    assert (await watch(await new.attach("ann", turn.response_id)))[-1] == events[-1]


def events_after(events: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    rest = []
    for event in events:
        if event["sequence_number"] <= number:
            continue
        if event["type"] == "response.output_text.delta":
            first = event["sequence_number"] - len(event["delta"]) + 1
            event = {**event, "delta": event["delta"][max(0, number + 1 - first) :]}
        rest.append(event)
    return rest


@pytest.mark.parametrize("fields", [{}, {"generate": False}])
async def test_turns_without_output_are_told_again_too(
    new_sessions: NewSessions, fields: dict[str, Any]
) -> None:
    old = await new_sessions(ScriptedEngine(lambda request: []))
    turn = await old.begin(spec(**fields))
    events = await watch(turn)
    new = await new_sessions(ScriptedEngine())
    stored = await new.attach("ann", turn.response_id)
    assert isinstance(stored, StoredTurn)
    new._store.read_log = none  # type: ignore[method-assign]
    told = await watch(stored)
    check_strictly(told)
    assert told[-1] == events[-1]


async def none(response_id: str, after: int) -> None:
    return None


async def test_a_turn_that_was_interrupted_has_failed_and_shows_what_it_had(
    new_sessions: NewSessions, engine: ScriptedEngine, valkey_url: str
) -> None:
    engine.script = says("abcdef")
    old = await new_sessions()
    name = (await old.create_conversation("ann"))["id"]
    before = await finished(old, spec("a", conversation_id=name))
    engine.pause()
    turn = await old.begin(spec("b", conversation_id=name))
    assert isinstance(turn, LiveTurn)
    engine.step(3)
    await until(lambda: turn.writer.log.text == "abc")
    follower = await new_sessions(ScriptedEngine())
    seen = []
    async for event in (await follower.attach("ann", turn.response_id)).events():
        seen.append(event)
        if event["type"] == "response.output_text.delta":
            await kill(old, old._store, valkey_url)  # type: ignore[arg-type]
    check_strictly(seen)
    assert seen[-1]["type"] == "response.failed"
    new = await new_sessions(ScriptedEngine())
    response = await new.response("ann", turn.response_id)
    assert response == seen[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert text_of(response) == "abc"
    conversation = await new.conversation("ann", name)
    assert conversation["active_response"] is None
    assert conversation["last_response"] == before["id"]
    assert (await finished(new, spec("c", conversation_id=name)))["status"] == "completed"
    error = await refused(new.begin(spec(previous_response_id=turn.response_id)))
    assert error.code == "previous_response_not_found"


async def test_who_saw_more_than_was_logged_learns_of_the_end_too(
    new_sessions: NewSessions, engine: ScriptedEngine, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = says("abcdef")
    old = await new_sessions()
    engine.pause()
    with monkeypatch.context() as patch:
        patch.setattr(old._store, "append_log", lost)
        turn = await old.begin(spec())
        assert isinstance(turn, LiveTurn)
        engine.step(3)
        await until(lambda: turn.writer.log.text == "abc")
        await kill(old, old._store, valkey_url)  # type: ignore[arg-type]
    new = await new_sessions(ScriptedEngine())
    for seen in range(turn.writer.log.last + 1):
        *_, last = await watch(await new.attach("ann", turn.response_id), seen)
        assert last["type"] == "response.failed"
        assert last["sequence_number"] > seen


async def lost(response_id: str, entries: Any) -> bool:
    return False


async def test_an_interrupted_turn_holds_nobody_up_even_if_nobody_looked_at_it(
    new_sessions: NewSessions, engine: ScriptedEngine, valkey_url: str
) -> None:
    old = await new_sessions()
    name = (await old.create_conversation("ann"))["id"]
    engine.pause()
    await old.begin(spec("a", conversation_id=name))
    await kill(old, old._store, valkey_url)  # type: ignore[arg-type]
    new = await new_sessions(ScriptedEngine())
    turn = await new.begin(spec("b", conversation_id=name))
    events = await watch(turn)
    assert not any(event["type"] == "response.queued" for event in events)
    assert events[-1]["response"]["status"] == "completed"


async def test_looking_at_a_conversation_settles_its_interrupted_turn(
    new_sessions: NewSessions, engine: ScriptedEngine, valkey_url: str
) -> None:
    old = await new_sessions()
    name = (await old.create_conversation("ann"))["id"]
    engine.pause()
    turn = await old.begin(spec("a", conversation_id=name))
    await kill(old, old._store, valkey_url)  # type: ignore[arg-type]
    new = await new_sessions(ScriptedEngine())
    assert (await new.conversation("ann", name))["active_response"] is None
    assert await new.conversation_items("ann", name) == []
    assert (await new.response("ann", turn.response_id))["status"] == "failed"


async def test_an_exclusive_store_knows_that_all_others_are_gone(
    new_sessions: NewSessions, new_store: NewStore, engine: ScriptedEngine, valkey_url: str
) -> None:
    old = await new_sessions()
    engine.pause()
    turn = await old.begin(spec())
    alone = RedisStore(valkey_url, prefix=new_store()._prefix, exclusive=True)
    await alone.start()
    record = await alone.turn(turn.response_id)
    assert record is not None
    assert record.orphaned
    await alone.close()


async def test_a_store_that_fails_at_the_end_fails_the_turn_and_frees_its_conversation(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    name = (await sessions.create_conversation("ann"))["id"]

    async def unreachable(*args: Any, **fields: Any) -> bool:
        raise StoreUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(sessions._store, "finish_turn", unreachable)
        turn = await sessions.begin(spec("a", conversation_id=name))
        events = await watch(turn)
    check_strictly(events)
    assert events[-1]["type"] == "response.failed"
    assert "store" in events[-1]["response"]["error"]["message"]
    await until(lambda: sessions.running == 0)
    assert (await finished(sessions, spec("b", conversation_id=name)))["status"] == "completed"
    assert (await sessions.response("ann", turn.response_id))["status"] == "failed"


async def test_a_log_that_cannot_be_written_does_not_touch_the_answer(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*args: Any) -> bool:
        raise StoreUnavailable

    monkeypatch.setattr(sessions._store, "append_log", unreachable)
    assert text_of(await finished(sessions, spec())) == "ok"


async def test_ids_are_kept_to_the_last_one(new_sessions: NewSessions, engine: ScriptedEngine) -> None:
    engine.script = says("abcdef")
    old = await new_sessions()
    response = await finished(old, spec())
    new = await new_sessions(ScriptedEngine())
    [record] = await new._store.chain(response["id"])
    assert record.segment.ids.tolist() == engine.requests[0].prompt_ids
    assert record.output_ids.tolist() == ids_of("abcdef")
