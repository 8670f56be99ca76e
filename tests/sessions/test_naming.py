"""Who may name which turn: owners, connections, repeated messages, deleted ones."""

from __future__ import annotations

import asyncio

import pytest

from sessions import LiveTurn, Sessions, StoredTurn
from sessions.api import SessionError
from tests.sessions.asking import refused, toy_text
from tests.sessions.conftest import NewSessions
from tests.sessions.support import (
    ScriptedEngine,
    finished,
    spec,
    text_in,
    until,
    watch,
)
from tests.sessions.test_eventlog import merged

pytestmark = pytest.mark.anyio


# Who may name what.


async def test_an_unknown_parent_is_refused(sessions: Sessions) -> None:
    error = await refused(sessions.begin(spec(previous_response_id="resp_missing")))
    assert (error.code, error.status, error.param) == (
        "previous_response_not_found",
        400,
        "previous_response_id",
    )


async def test_nobody_reaches_what_another_owner_has(sessions: Sessions) -> None:
    response = await finished(sessions, spec())
    name = response["id"]
    eve = spec(owner="eve", previous_response_id=name)
    assert (await refused(sessions.begin(eve))).code == "previous_response_not_found"
    for attempt in (sessions.attach, sessions.response, sessions.cancel, sessions.delete_response):
        error = await refused(attempt("eve", name))
        assert (error.code, error.status) == ("response_not_found", 404)


async def test_a_running_parent_is_refused(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    turn = await sessions.begin(spec())
    error = await refused(sessions.begin(spec(previous_response_id=turn.response_id)))
    assert error.code == "previous_response_in_progress"
    assert error.param == "previous_response_id"


async def test_unstored_turns_can_be_named_over_their_own_connection_only(sessions: Sessions) -> None:
    first = await finished(sessions, spec("a", store=False, scope="one"))
    follow = {"store": False, "previous_response_id": first["id"]}
    for other in (
        spec("b", scope="two", **follow),
        spec("b", **follow),
        spec("b", owner="eve", scope="one", **follow),
    ):
        assert (await refused(sessions.begin(other))).code == "previous_response_not_found"
    assert (await refused(sessions.response("ann", first["id"]))).status == 404
    assert (await refused(sessions.attach("ann", first["id"]))).status == 404
    assert isinstance(await sessions.attach("ann", first["id"], scope="one"), LiveTurn)
    second = await finished(sessions, spec("b", scope="one", **follow))
    assert second["status"] == "completed"
    await sessions.close_scope("one")
    error = await refused(
        sessions.begin(spec("c", scope="one", store=False, previous_response_id=second["id"]))
    )
    assert error.code == "previous_response_not_found"


async def test_an_unstored_turn_may_go_on_from_a_stored_one_but_not_the_other_way(sessions: Sessions) -> None:
    stored = await finished(sessions, spec("a"))
    passing = await finished(sessions, spec("b", store=False, scope="one", previous_response_id=stored["id"]))
    error = await refused(sessions.begin(spec("c", scope="one", previous_response_id=passing["id"])))
    assert error.param == "store"


async def test_closing_a_scope_gives_its_branches_back(sessions: Sessions, engine: ScriptedEngine) -> None:
    first = await finished(sessions, spec("a", store=False, scope="one"))
    second = await finished(sessions, spec("b", store=False, scope="one", previous_response_id=first["id"]))
    kept = await finished(sessions, spec("c", scope="one"))
    await sessions.close_scope("one")
    await until(lambda: engine.released)
    assert engine.released == [("ann", second["id"])]
    assert (await sessions.response("ann", kept["id"]))["status"] == "completed"


# Idempotency.


async def test_the_same_client_message_begins_one_turn(sessions: Sessions, engine: ScriptedEngine) -> None:
    one, two = await asyncio.gather(
        sessions.begin(spec(client_msg_id="m1")), sessions.begin(spec(client_msg_id="m1"))
    )
    assert one.response_id == two.response_id
    await watch(one)
    again = await sessions.begin(spec(client_msg_id="m1"))
    assert again.response_id == one.response_id
    assert text_in(await watch(again)) == "ok"
    other = await sessions.begin(spec(owner="bob", client_msg_id="m1"))
    assert other.response_id != one.response_id
    await watch(other)
    assert len(engine.requests) == 2


async def test_the_same_client_message_does_not_reach_over_connections(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    asked = {"client_msg_id": "m1", "store": False}
    one, two = await asyncio.gather(
        sessions.begin(spec(scope="one", **asked)),
        sessions.begin(spec(scope="two", **asked)),
        return_exceptions=True,
    )
    assert isinstance(one, LiveTurn)
    assert isinstance(two, SessionError)
    assert two.code == "response_not_found"
    await watch(one)
    assert len(engine.requests) == 1


async def test_a_client_message_that_was_refused_may_be_sent_again(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.die()
    first, second = await asyncio.gather(
        sessions.begin(spec(client_msg_id="m1")),
        sessions.begin(spec(client_msg_id="m1")),
        return_exceptions=True,
    )
    assert isinstance(first, SessionError)
    assert isinstance(second, SessionError)
    engine.revive()
    assert (await finished(sessions, spec(client_msg_id="m1")))["status"] == "completed"


# Deleting.


async def test_a_deleted_response_cannot_be_seen_or_named_and_its_branch_is_released(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    response = await finished(sessions, spec())
    await sessions.delete_response("ann", response["id"])
    assert (await refused(sessions.response("ann", response["id"]))).status == 404
    assert (await refused(sessions.attach("ann", response["id"]))).status == 404
    assert (await refused(sessions.delete_response("ann", response["id"]))).status == 404
    error = await refused(sessions.begin(spec(previous_response_id=response["id"])))
    assert error.code == "previous_response_not_found"
    await until(lambda: engine.released)
    assert engine.released == [("ann", response["id"])]


async def test_deleting_in_the_middle_leaves_what_goes_on_from_it_whole(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    first = await finished(sessions, spec("a"))
    second = await finished(sessions, spec("b", previous_response_id=first["id"]))
    await sessions.delete_response("ann", first["id"])
    third = await finished(sessions, spec("c", previous_response_id=second["id"]))
    assert third["status"] == "completed"
    assert "<s>user\na<e>" in toy_text(engine.requests[-1])


async def test_who_cannot_name_a_running_response_cannot_end_it(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.pause()
    turn = await sessions.begin(spec(store=False, scope="one"))
    assert (await refused(sessions.delete_response("ann", turn.response_id))).code == "response_not_found"
    engine.resume()
    assert (await watch(turn))[-1]["type"] == "response.completed"


async def test_deleting_a_running_response_ends_it(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    turn = await sessions.begin(spec())
    await sessions.delete_response("ann", turn.response_id)
    assert not engine.running
    assert (await refused(sessions.response("ann", turn.response_id))).status == 404


async def test_finished_turns_that_are_not_at_hand_any_more_are_read(
    sessions: Sessions, new_sessions: NewSessions
) -> None:
    turn = await sessions.begin(spec())
    events = await watch(turn)
    await until(lambda: sessions.running == 0)
    elsewhere = await new_sessions(ScriptedEngine())
    stored = await elsewhere.attach("ann", turn.response_id)
    assert isinstance(stored, StoredTurn)
    assert stored.response == events[-1]["response"] == await stored.result()
    assert await watch(stored) == merged(events)
