"""Viewers that come and go, turns that are cancelled, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from engine.api import GenerateRequest
from sessions import LiveTurn, Sessions
from sessions.api import Event
from tests.sessions.asking import CLOSING, new_part, refused, toy_text
from tests.sessions.conftest import NewSessions
from tests.sessions.support import (
    ScriptedEngine,
    finished,
    ids_of,
    said,
    says,
    spec,
    text_in,
    text_of,
    toy_tokenizer,
    until,
    user,
    watch,
)
from tests.sessions.test_turn import check_strictly

pytestmark = pytest.mark.anyio


# Watching and leaving.


async def test_a_viewer_may_come_late_and_others_may_leave(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("abcdef")
    engine.pause()
    turn = await sessions.begin(spec())
    first = asyncio.create_task(watch(turn))
    engine.step(3)
    assert isinstance(turn, LiveTurn)
    await until(lambda: turn.writer.log.text == "abc")
    leaver = turn.events()
    async for event in leaver:
        if event["type"] == "response.output_text.delta":
            break
    await leaver.aclose()
    late = await sessions.attach("ann", turn.response_id)
    second = asyncio.create_task(watch(late))
    third = asyncio.create_task(watch(late, starting_after=5))
    engine.resume()
    for events in (await first, await second):
        check_strictly(events)
        assert text_in(events) == "abcdef"
    assert text_in(await third) == "cdef"


async def test_a_stored_turn_goes_on_without_viewers(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    turn = await sessions.begin(spec())
    await leave(turn)
    engine.resume()
    assert (await turn.result())["status"] == "completed"


@pytest.mark.parametrize("fields", [{"store": False}, {"store": False, "scope": "one"}, {"detach": "cancel"}])
async def test_what_nobody_else_can_see_ends_with_its_last_viewer(
    sessions: Sessions, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    engine.pause()
    turn = await sessions.begin(spec(**fields))
    staying = asyncio.create_task(watch(turn))
    await asyncio.sleep(0)
    await leave(turn)
    await asyncio.sleep(0.01)
    assert engine.running
    staying.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await staying
    assert (await turn.result())["status"] == "cancelled"
    assert not engine.running


async def test_closing_a_scope_ends_what_runs_in_it(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    passing = await sessions.begin(spec(store=False, scope="one"))
    stored = await sessions.begin(spec(scope="one"))
    await sessions.close_scope("one")
    assert (await passing.result())["status"] == "cancelled"
    assert (await sessions.response("ann", stored.response_id))["status"] == "in_progress"


async def leave(turn: Any) -> None:
    """Watch until the turn is under way, then go."""
    events = turn.events()
    async for event in events:
        if event["type"] == "response.in_progress":
            break
    await events.aclose()


async def test_a_viewer_that_was_there_to_the_end_cancels_nothing(sessions: Sessions) -> None:
    turn = await sessions.begin(spec(store=False))
    await watch(turn)
    assert (await turn.result())["status"] == "completed"


# Cancelling.


async def test_cancelling_keeps_the_partial_answer_as_a_turn_to_go_on_from(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("abcdef")
    engine.pause()
    turn = await sessions.begin(spec())
    engine.step(3)
    await until(lambda: isinstance(turn, LiveTurn) and turn.writer.log.text == "abc")
    await sessions.cancel("ann", turn.response_id)
    events = await watch(turn)
    check_strictly(events)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("cancelled", None)
    assert text_of(response) == "abc"
    assert response["usage"]["output_tokens"] == 3
    assert not engine.running
    engine.resume()
    await finished(sessions, spec("more", previous_response_id=turn.response_id))
    assert new_part(engine)[:5] == [*ids_of("abc"), 2, *CLOSING]


async def test_cancelling_before_the_first_token(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.pause()
    turn = await sessions.begin(spec())
    await turn.cancel()
    response = await turn.result()
    assert (response["status"], response["output"]) == ("cancelled", [])
    assert response["usage"]["output_tokens"] == 0


async def test_cancelling_what_is_over_or_unknown_is_refused(sessions: Sessions) -> None:
    response = await finished(sessions, spec())
    assert (await refused(sessions.cancel("ann", response["id"]))).code == "response_not_active"
    assert (await refused(sessions.cancel("ann", "resp_missing"))).code == "response_not_found"


async def test_an_engine_that_does_not_confirm_an_abort_holds_nobody_up(
    sessions: Sessions, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sessions.generation.ABORT_TIMEOUT_S", 0.05)
    engine.deaf = True
    engine.pause()
    turn = await sessions.begin(spec())
    await leave(turn)
    await turn.cancel()
    assert (await turn.result())["status"] == "cancelled"
    assert not engine.running


# What goes wrong.


async def test_an_engine_that_dies_fails_the_turn_and_the_next_one_works(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("abcdef")
    parent = await finished(sessions, spec("a"))
    engine.pause()
    turn = await sessions.begin(spec("b", previous_response_id=parent["id"]))
    engine.step(3)
    await until(lambda: isinstance(turn, LiveTurn) and turn.writer.opened)
    engine.die()
    events = await watch(turn)
    check_strictly(events)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    error = await refused(sessions.begin(spec("c", previous_response_id=parent["id"])))
    assert (error.code, error.status) == ("engine_restarting", 503)
    engine.revive()
    engine.resume()
    error = await refused(sessions.begin(spec("c", previous_response_id=turn.response_id)))
    assert error.code == "previous_response_not_found"
    again = await finished(sessions, spec("b", previous_response_id=parent["id"]))
    assert again["status"] == "completed"
    # The branch the failed turn had taken is its parent's again.
    assert engine.requests[-1].branch == engine.requests[-2].branch == parent["id"]


async def test_an_engine_that_refuses_or_breaks_fails_the_turn_without_telling_internals(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    def broken(request: GenerateRequest) -> list[int]:
        raise RuntimeError("secret path /x")

    engine.script = broken
    response = await finished(sessions, spec())
    assert response["status"] == "failed"
    assert "secret" not in str(response)


async def test_a_prompt_longer_than_the_context_is_refused_with_numbers(
    new_sessions: NewSessions,
) -> None:
    engine = ScriptedEngine(max_model_len=60)
    sessions = await new_sessions(engine)
    error = await refused(sessions.begin(spec("x" * 100)))
    assert (error.code, error.param, error.status) == ("context_length_exceeded", "input", 400)
    assert "60" in error.message
    assert not engine.requests


async def test_what_the_template_refuses_names_the_input(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    from tests.sessions.support import NO_SYSTEM

    sessions = await new_sessions(tokenizer=toy_tokenizer(NO_SYSTEM))
    error = await refused(sessions.begin(spec("a", instructions="Be brief.")))
    assert (error.param, error.code) == ("input", "invalid_prompt")
    assert "System role not supported" in error.message


async def test_contradicting_fields_are_refused(sessions: Sessions) -> None:
    both = spec(conversation_id="conv_1", previous_response_id="resp_1")
    assert (await refused(sessions.begin(both))).param == "previous_response_id"
    unstored = spec(conversation_id="conv_1", store=False)
    assert (await refused(sessions.begin(unstored))).param == "store"
    for item in (
        {"type": "function_call"},
        said("wizard", "x"),
        {"role": "user"},
        {"role": "user", "content": [1]},
    ):
        error = await refused(sessions.begin(spec(input=[user("x"), item])))
        assert (error.param or "").startswith("input[1]")


async def test_half_a_surrogate_pair_is_taken_as_an_unknown_letter(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    assert (await finished(sessions, spec("a\ud800b")))["status"] == "completed"
    assert "a?b" in toy_text(engine.requests[-1])


# Waiting.


async def test_work_is_reported_until_the_first_token(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    sessions = await new_sessions(progress_s=0.01)
    engine.pause()
    turn = await sessions.begin(spec())
    seen: list[Event] = []
    async for event in turn.events():
        seen.append(event)
        if sum(e["type"] == "response.in_progress" for e in seen) == 3:
            engine.resume()
    check_strictly(seen)
    assert seen[-1]["type"] == "response.completed"


async def test_closing_keeps_what_was_said_so_far(new_sessions: NewSessions, engine: ScriptedEngine) -> None:
    sessions = await new_sessions()
    engine.script = says("abcdef")
    engine.pause()
    turn = await sessions.begin(spec())
    engine.step(2)
    await until(lambda: isinstance(turn, LiveTurn) and turn.writer.log.text == "ab")
    await sessions.close()
    assert (await refused(sessions.begin(spec()))).code == "server_draining"
    after = await new_sessions(ScriptedEngine())
    response = await after.response("ann", turn.response_id)
    assert (response["status"], text_of(response)) == ("cancelled", "ab")
