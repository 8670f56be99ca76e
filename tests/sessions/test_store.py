"""The store by itself: every mutation is whole, may be sent twice, and leaves nothing behind for ever."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from redis.asyncio import Redis

from sessions import RedisStore, redis_store, tokens
from sessions.eventlog import DeltaRun, EventLog, Single
from sessions.ids import new_id
from sessions.prompt import Segment
from sessions.response import new_response
from sessions.store import TurnRecord
from sessions.tokenizer import Message
from tests.sessions.conftest import NewStore
from tests.sessions.support import spec, user

pytestmark = pytest.mark.anyio

SHAPE = {"type": "response.output_text.delta", "item_id": "msg_1"}


def record(parent: TurnRecord | None = None, **fields: Any) -> TurnRecord:
    name = fields.pop("id", new_id("resp"))
    return TurnRecord(
        id=name,
        owner=fields.pop("owner", "ann"),
        parent_id=parent.id if parent is not None else None,
        conversation_id=fields.pop("conversation_id", None),
        generate=True,
        branch="branch",
        instructions="Be brief.",
        input=[user("hello")],
        messages=[Message("user", "hello")],
        segment=fields.pop("segment", Segment(tokens.ids([1, 70_000]), tokens.ids([1, 70_000]))),
        output_ids=tokens.ids(),
        response=new_response(name, spec(), created_at=1, status="in_progress"),
        **fields,
    )


def over(turn: TurnRecord, status: str = "completed") -> TurnRecord:
    return dataclasses.replace(
        turn, response=turn.response | {"status": status}, output_ids=tokens.ids([5, 6]), last_number=9
    )


async def add(store: RedisStore, parent: TurnRecord | None = None, **fields: Any) -> TurnRecord:
    turn = record(parent, **fields)
    assert (await store.begin_turn(turn)).kind == "begun"
    assert await store.finish_turn(over(turn), advance=True)
    return over(turn)


async def keys(store: RedisStore, valkey_url: str) -> dict[str, int]:
    """The keys there are, and how many seconds each has left (-1: for good)."""
    async with Redis.from_url(valkey_url) as redis:
        found = [key async for key in redis.scan_iter(match=store._prefix + "*", count=1000)]
        return {key.decode().removeprefix(store._prefix): await redis.ttl(key) for key in found}


async def test_a_turn_comes_back_as_it_was(store: RedisStore) -> None:
    running = record(segment=Segment(tokens.ids([1, 2]), tokens.ids([1])))
    await store.begin_turn(running)
    # This very process is known to write it; whether it still does is for it to say.
    assert await store.turn(running.id) == dataclasses.replace(running, orphaned=True)
    await store.finish_turn(over(running), advance=True)
    assert await store.turn(running.id) == over(running)
    assert await store.turn("resp_missing") is None


async def test_a_turn_of_a_living_process_is_not_orphaned(store: RedisStore, new_store: NewStore) -> None:
    running = record()
    await store.begin_turn(running)
    other = new_store()
    await other.start()
    assert await other.turn(running.id) == running
    assert not await other.interrupt_turn(over(running, "failed"))
    await store.close()
    found = await other.turn(running.id)
    assert found is not None
    assert found.orphaned
    assert await other.interrupt_turn(over(running, "failed"))
    assert await other.turn(running.id) == over(running, "failed")
    await other.close()


async def test_what_is_sent_twice_is_done_once(store: RedisStore) -> None:
    conversation = await store.create_conversation("ann", {})
    turn = record(conversation_id=conversation.id)
    for _ in range(2):
        assert (await store.begin_turn(turn, client_msg_id="m")).kind == "begun"
    for _ in range(2):
        assert await store.finish_turn(over(turn), advance=True)
    after = await store.conversation(conversation.id)
    assert after is not None
    assert after.rev == conversation.rev + 2
    for _ in range(2):
        outcome = await store.update_conversation("ann", conversation.id, {"title": "x"}, rev=after.rev)
        assert (outcome.kind, outcome.rev) == ("updated", after.rev + 1)
    assert (
        await store.update_conversation("ann", conversation.id, {"title": "y"}, rev=after.rev)
    ).kind == "conflict"


async def test_a_turn_ends_once(store: RedisStore) -> None:
    turn = await add(store)
    assert not await store.finish_turn(over(turn, "failed"), advance=True)
    assert not await store.interrupt_turn(over(turn, "failed"))
    assert await store.turn(turn.id) == turn


async def test_why_a_turn_may_not_begin(store: RedisStore, new_store: NewStore) -> None:
    conversation = await store.create_conversation("ann", {})
    missing = record(record())
    assert (await store.begin_turn(missing)).kind == "no_parent"
    assert (await store.begin_turn(record(conversation_id="conv_missing"))).kind == "no_conversation"
    foreign = record(owner="eve", conversation_id=conversation.id)
    assert (await store.begin_turn(foreign)).kind == "no_conversation"
    other = new_store()
    await other.start()
    running = record(conversation_id=conversation.id)
    await other.begin_turn(running)
    busy = await store.begin_turn(record(conversation_id=conversation.id))
    assert (busy.kind, busy.response_id) == ("busy", running.id)
    await other.finish_turn(over(running), advance=True)
    await other.close()
    assert (await store.begin_turn(record(conversation_id=conversation.id))).kind == "moved"
    first = record()
    await store.begin_turn(first, client_msg_id="m")
    again = await store.begin_turn(record(), client_msg_id="m")
    assert (again.kind, again.response_id) == ("duplicate", first.id)
    assert (await store.begin_turn(record(owner="eve"), client_msg_id="m")).kind == "begun"


async def test_a_chain_is_read_from_its_first_turn(store: RedisStore) -> None:
    first = await add(store)
    second = await add(store, first)
    third = await add(store, second)
    assert [turn.id for turn in await store.chain(third.id)] == [first.id, second.id, third.id]
    assert await store.chain("resp_missing") == []


async def test_a_deleted_turn_stays_as_a_link_until_nobody_needs_it(
    store: RedisStore, valkey_url: str
) -> None:
    first = await add(store)
    second = await add(store, first)
    left, right = await add(store, second), await add(store, second)
    assert not await store.delete_turn("eve", second.id)
    assert await store.delete_turn("ann", second.id)
    assert not await store.delete_turn("ann", second.id)
    assert [turn.deleted for turn in await store.chain(left.id)] == [False, True, False]
    assert (await store.begin_turn(record(second))).kind == "no_parent"
    await store.delete_turn("ann", first.id)
    await store.delete_turn("ann", left.id)
    assert len(await store.chain(right.id)) == 3
    await store.delete_turn("ann", right.id)
    assert not any(key.startswith("turn:") for key in await keys(store, valkey_url))


async def test_the_leaf_goes_back_over_links_to_a_turn_that_can_be_seen(store: RedisStore) -> None:
    conversation = await store.create_conversation("ann", {})
    first = await add(store, conversation_id=conversation.id)
    second = await add(store, first, conversation_id=conversation.id)
    await add(store, second)  # a fork outside, for which the link is kept
    third = await add(store, second, conversation_id=conversation.id)
    await store.delete_turn("ann", second.id)
    await store.delete_turn("ann", third.id)
    found = await store.conversation(conversation.id)
    assert found is not None
    assert found.leaf == first.id


async def test_nothing_outlives_a_deleted_conversation_but_what_others_need(
    store: RedisStore, valkey_url: str
) -> None:
    conversation = await store.create_conversation("ann", {})
    first = await add(store, conversation_id=conversation.id)
    second = await add(store, first, conversation_id=conversation.id)
    fork = await add(store, first)
    running = record(second, conversation_id=conversation.id)
    await store.begin_turn(running)
    await store.append_log(running.id, [Single({"type": "x", "sequence_number": 0})])
    assert await store.delete_conversation("eve", conversation.id) is None
    deleted = await store.delete_conversation("ann", conversation.id)
    assert set(deleted or ()) == {first.id, second.id, running.id}
    left = await keys(store, valkey_url)
    assert {key for key in left if not key.startswith("worker:")} == {f"turn:{first.id}", f"turn:{fork.id}"}
    assert left[f"turn:{first.id}"] > 0
    assert not await store.finish_turn(over(running), advance=True)
    await store.append_log(running.id, [Single({"type": "x", "sequence_number": 1})])
    assert f"log:{running.id}" not in await keys(store, valkey_url)
    await store.delete_turn("ann", fork.id)
    assert all(key.startswith("worker:") for key in await keys(store, valkey_url))


async def test_no_name_of_one_kind_reaches_what_is_of_another(store: RedisStore, valkey_url: str) -> None:
    """Clients choose the names they ask for, so what stands behind `conv:` must always be a conversation."""
    conversation = await store.create_conversation("ann", {})
    first = await add(store, conversation_id=conversation.id)
    running = record(first, conversation_id=conversation.id)
    assert (await store.begin_turn(running, client_msg_id="a:b")).kind == "begun"
    await store.append_log(running.id, [Single({"type": "x", "sequence_number": 0})])
    names = {kind: set[str]() for kind in ("conv", "turn")}
    for key in await keys(store, valkey_url):
        kind, _, name = key.partition(":")
        names.get(kind, set()).add(name)
    assert names == {"conv": {conversation.id}, "turn": {first.id, running.id}}


async def test_a_cancelled_call_is_never_taken_for_a_finished_one(store: RedisStore) -> None:
    """Whoever waits for a task that was cancelled must not wait for ever, wherever in a call it was."""
    for steps in range(40):
        calls = [asyncio.create_task(store.turn("x")) for _ in range(10)]
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled = [call for call in calls if call.cancel()]
        await asyncio.wait(calls)
        assert [call for call in cancelled if not call.cancelled()] == [], steps


async def test_what_no_conversation_keeps_expires(store: RedisStore, valkey_url: str) -> None:
    conversation = await store.create_conversation("ann", {})
    kept = await add(store, conversation_id=conversation.id)
    passing = record()
    await store.begin_turn(passing, client_msg_id="m")
    await store.append_log(passing.id, [Single({"type": "x", "sequence_number": 0})])
    left = await keys(store, valkey_url)
    assert left[f"turn:{kept.id}"] == -1
    assert 0 < left[f"turn:{passing.id}"] <= redis_store.TURN_TTL_S
    assert 0 < left["idem:ann:m"] <= redis_store.MESSAGE_TTL_S
    assert 0 < left[f"log:{passing.id}"] <= redis_store.LOG_TTL_S
    assert all(0 < ttl <= redis_store.WORKER_TTL_S for key, ttl in left.items() if key.startswith("worker:"))


async def test_reading_a_chain_puts_off_its_expiry(store: RedisStore, valkey_url: str) -> None:
    first = await add(store)
    second = await add(store, first)
    async with Redis.from_url(valkey_url) as redis:
        await redis.expire(f"{store._prefix}turn:{first.id}", 100)
    await store.chain(second.id)
    assert (await keys(store, valkey_url))[f"turn:{first.id}"] > 100


def a_log() -> EventLog:
    log = EventLog()
    log.append({"type": "a"})
    for letter in "xyz":
        log.append_delta(SHAPE, letter)
    log.append({"type": "b"})
    return log


@pytest.mark.parametrize("after", range(-1, 5))
async def test_a_log_can_be_read_from_anywhere(store: RedisStore, after: int) -> None:
    turn, log = record(), a_log()
    await store.begin_turn(turn)
    await store.append_log(turn.id, log.entries(-1)[:2])
    await store.append_log(turn.id, log.entries(3))
    read = await store.read_log(turn.id, after)
    assert read is not None
    assert EventLog(read).read(after) == log.read(after)


async def test_log_entries_that_are_sent_twice_are_there_once(store: RedisStore) -> None:
    turn, log = record(), a_log()
    await store.begin_turn(turn)
    for _ in range(2):
        await store.append_log(turn.id, log.entries(-1))
    # As when the answer to a write was lost and more has come since.
    await store.append_log(turn.id, [*log.entries(0), Single({"type": "c", "sequence_number": 5})])
    read = await store.read_log(turn.id, -1)
    assert read is not None
    assert [entry.last for entry in read] == [0, 3, 4, 5]
    assert EventLog(read).text == "xyz"


async def test_a_log_whose_beginning_is_gone_says_so(store: RedisStore, valkey_url: str) -> None:
    turn = record()
    await store.begin_turn(turn)
    await store.append_log(turn.id, [Single({"type": "x", "sequence_number": number}) for number in range(5)])
    async with Redis.from_url(valkey_url) as redis:
        await redis.xtrim(f"{store._prefix}log:{turn.id}", maxlen=2, approximate=False)
    assert await store.read_log(turn.id, 1) is None
    assert [entry.first for entry in await store.read_log(turn.id, 2) or []] == [3, 4]


async def test_a_run_longer_than_what_was_read_is_cut_by_the_reader(store: RedisStore) -> None:
    turn = record()
    await store.begin_turn(turn)
    await store.append_log(turn.id, [DeltaRun(0, SHAPE, ["a", "b", "c"])])
    read = await store.read_log(turn.id, 1)
    assert read == [DeltaRun(0, SHAPE, ["a", "b", "c"])]
    assert EventLog(read).read(1)[0]["delta"] == "c"


async def test_a_cancel_reaches_whoever_writes_the_log(store: RedisStore) -> None:
    turn = record()
    await store.begin_turn(turn)
    assert not await store.append_log(turn.id, [])
    await store.request_cancel(turn.id)
    assert await store.append_log(turn.id, [])
    await store.finish_turn(over(turn), advance=True)
    await store.request_cancel(turn.id)
    assert not await store.append_log(turn.id, [])


async def test_scripts_are_loaded_again_after_the_server_forgot_them(
    store: RedisStore, valkey_url: str
) -> None:
    await store.create_conversation("ann", {})
    async with Redis.from_url(valkey_url) as redis:
        await redis.script_flush()
    assert (await store.create_conversation("ann", {})).rev == 1
