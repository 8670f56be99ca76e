"""Turns from outside: what a front sees of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from engine.api import GenerateRequest, SamplingParams
from sessions import LiveTurn, Sessions, StoredTurn
from sessions.api import Event, SessionError
from tests.sessions.conftest import NewSessions
from tests.sessions.support import (
    ScriptedEngine,
    default_tokenizer,
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
from tests.sessions.test_eventlog import merged
from tests.sessions.test_turn import check_strictly

pytestmark = pytest.mark.anyio

CLOSING = ids_of("\n")  # what the template puts between the token that ends an answer and the next turn


async def refused(awaitable: Any) -> SessionError:
    with pytest.raises(SessionError) as caught:
        await awaitable
    return caught.value


def new_part(engine: ScriptedEngine) -> list[int]:
    """What the last prompt has beyond the one before it."""
    before, last = engine.requests[-2].prompt_ids, engine.requests[-1].prompt_ids
    assert last[: len(before)] == before
    return last[len(before) :]


# A turn.


async def test_a_turn_tells_its_whole_story_in_order(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.script = says("Paris is it")
    turn = await sessions.begin(spec("Capital of France?"))
    events = await watch(turn)
    check_strictly(events)
    assert text_in(events) == "Paris is it"
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert text_of(response) == "Paris is it"
    assert response == await turn.result() == await sessions.response("ann", response["id"])
    assert response["usage"]["output_tokens"] == len("Paris is it") + 1
    assert response["usage"]["input_tokens"] == len(engine.requests[0].prompt_ids)


async def test_the_engine_is_asked_with_the_owner_as_tenant(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    response = await finished(sessions, spec(sampling=SamplingParams(max_tokens=7, stop=("x",), seed=3)))
    request = engine.requests[0]
    assert request.tenant == "ann"
    assert request.request_id == response["id"]
    assert request.branch == response["id"]
    assert request.sampling == SamplingParams(max_tokens=7, seed=3), (
        "stop strings are text, and none of its business"
    )


async def test_without_a_limit_the_answer_may_fill_the_context(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    await finished(sessions, spec())
    request = engine.requests[0]
    assert request.sampling.max_tokens == 4096 - len(request.prompt_ids)


async def test_an_answer_cut_by_its_limit_is_incomplete_and_can_be_gone_on_from(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("abcdef")
    response = await finished(sessions, spec(sampling=SamplingParams(max_tokens=3)))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text_of(response) == "abc"
    await finished(sessions, spec("more", previous_response_id=response["id"]))
    # The token that closes an answer was never generated, so it comes with the next turn.
    assert new_part(engine)[:5] == [*ids_of("abc"), 2, *CLOSING]


async def test_a_stop_string_ends_the_generation_and_is_no_part_of_the_history(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("abcSTOPdef")
    turn = await sessions.begin(spec(sampling=SamplingParams(max_tokens=100, stop=("STOP",))))
    events = await watch(turn)
    check_strictly(events)
    assert text_in(events) == "abc"
    assert events[-1]["response"]["status"] == "completed"
    assert events[-1]["response"]["usage"]["output_tokens"] == len("abcSTOP")
    await until(lambda: not engine.running)
    await finished(sessions, spec("more", previous_response_id=turn.response_id))
    assert new_part(engine)[:5] == [*ids_of("abc"), 2, *CLOSING]


async def test_a_stop_token_ends_the_answer_without_showing(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    [stop] = ids_of("#")
    engine.script = lambda request: ids_of("ab#")
    response = await finished(sessions, spec(sampling=SamplingParams(max_tokens=9, stop_token_ids=(stop,))))
    assert response["status"] == "completed"
    assert text_of(response) == "ab"
    assert response["usage"]["output_tokens"] == 3


# The next turn.


async def test_the_next_turn_adds_only_what_is_new(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.script = says("one", "two")
    first = await finished(sessions, spec("a"))
    second = await finished(sessions, spec("b", previous_response_id=first["id"]))
    assert second["previous_response_id"] == first["id"]
    assert new_part(engine) == [
        *ids_of("one"),
        2,
        *CLOSING,
        1,
        *ids_of("user\nb"),
        2,
        *CLOSING,
        1,
        *ids_of("assistant\n"),
    ]
    used = second["usage"]
    new_tokens = len(new_part(engine)) - len(ids_of("one"))
    # All but the new tokens and the last one generated, which no step has forwarded yet.
    assert used["input_tokens"] - used["input_tokens_details"]["cached_tokens"] <= new_tokens + 1


async def test_what_was_generated_is_never_encoded_again(
    sessions_with_default: Sessions, engine: ScriptedEngine
) -> None:
    tokenizer = default_tokenizer()
    letters = [token for letter in "hello there" for token in tokenizer.encode_text(letter)]
    assert letters != tokenizer.encode_text("hello there")
    engine.script = lambda request: [*letters, 2]
    first = await finished(sessions_with_default, spec("a"))
    assert text_of(first) == "hello there"
    await finished(sessions_with_default, spec("b", previous_response_id=first["id"]))
    assert new_part(engine)[: len(letters)] == letters


@pytest.fixture
async def sessions_with_default(new_sessions: NewSessions) -> Sessions:
    return await new_sessions(tokenizer=default_tokenizer())


async def test_five_turns_with_the_default_models_tokenizer_compute_their_own_tokens_only(
    sessions_with_default: Sessions, engine: ScriptedEngine
) -> None:
    engine.script = says("Paris.", "You asked for it. 👩‍👩‍👧", tokenizer=default_tokenizer())
    previous = None
    held = 0
    for number in range(5):
        response = await finished(
            sessions_with_default, spec(f"Question {number}?", previous_response_id=previous)
        )
        used = response["usage"]
        computed = used["input_tokens"] - used["input_tokens_details"]["cached_tokens"]
        if previous is not None:
            assert computed <= used["input_tokens"] - held + 1
        held = used["input_tokens"] + used["output_tokens"] - 1
        previous = response["id"]


async def test_forks_share_their_parent_and_get_branches_of_their_own(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    root = await finished(sessions, spec("a"))
    left = await finished(sessions, spec("b", previous_response_id=root["id"]))
    right = await finished(sessions, spec("c", previous_response_id=root["id"]))
    further = await finished(sessions, spec("d", previous_response_id=left["id"]))
    branches = [request.branch for request in engine.requests]
    # The first to go on takes the branch along; who comes later forks.
    assert branches == [root["id"], root["id"], right["id"], root["id"]]
    assert len({root["id"], left["id"], right["id"], further["id"]}) == 4


async def test_instructions_are_not_inherited(sessions: Sessions, engine: ScriptedEngine) -> None:
    engine.script = says("one", "two", "three")
    first = await finished(sessions, spec("a", instructions="Rhyme."))
    second = await finished(sessions, spec("b", previous_response_id=first["id"]))
    assert second["instructions"] is None
    await finished(sessions, spec("c", previous_response_id=second["id"], instructions="Rhyme."))
    prompts = [toy_text(request) for request in engine.requests]
    tail = "<s>user\na<e>\n<s>assistant\none<e>\n<s>user\nb<e>\n<s>assistant\n"
    assert prompts[0] == "<s>system\nRhyme.<e>\n<s>user\na<e>\n<s>assistant\n"
    assert prompts[1] == "<s>system\nYou help.<e>\n" + tail
    assert prompts[2] == "<s>system\nRhyme.<e>\n" + tail + "two<e>\n<s>user\nc<e>\n<s>assistant\n"


async def test_changed_instructions_keep_every_generated_id(
    sessions_with_default: Sessions, engine: ScriptedEngine
) -> None:
    letters = [token for letter in "hello there" for token in default_tokenizer().encode_text(letter)]
    engine.script = lambda request: [*letters, 2]
    first = await finished(sessions_with_default, spec("a"))
    await finished(sessions_with_default, spec("b", previous_response_id=first["id"], instructions="Rhyme."))
    prompt = engine.requests[-1].prompt_ids
    assert any(prompt[start : start + len(letters)] == letters for start in range(len(prompt)))


def toy_text(request: GenerateRequest) -> str:
    raw = toy_tokenizer()._tokenizer
    return str(raw.decode(request.prompt_ids, skip_special_tokens=False))


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


# Warm-ups.


async def test_a_warm_up_computes_the_prompt_and_can_be_gone_on_from(
    sessions: Sessions, engine: ScriptedEngine
) -> None:
    turn = await sessions.begin(spec("Long document.", instructions="Be brief.", generate=False))
    events = await watch(turn)
    assert [event["type"] for event in events] == ["response.created", "response.completed"]
    check_strictly(events)
    response = events[-1]["response"]
    assert response["output"] == []
    assert response["usage"]["input_tokens"] == len(engine.requests[0].prompt_ids)
    assert engine.requests[0].generate is False
    await finished(sessions, spec("Question?", instructions="Be brief.", previous_response_id=response["id"]))
    warmed, asked = (toy_text(request) for request in engine.requests)
    assert asked.startswith(warmed)
    assert asked.endswith("<s>user\nLong document.<e>\n<s>user\nQuestion?<e>\n<s>assistant\n")


async def test_an_empty_warm_up_is_answered_without_the_engine(
    new_sessions: NewSessions, engine: ScriptedEngine
) -> None:
    picky = "{{ '<x>' + messages[0]['role'] }}{% for m in messages %}{{ m['content'] + '<e>' }}{% endfor %}"
    sessions = await new_sessions(tokenizer=toy_tokenizer(picky))
    response = await finished(sessions, spec(None, generate=False, store=False, scope="one"))
    assert response["status"] == "completed"
    assert response["usage"]["input_tokens"] == 0
    assert not engine.requests
    after = spec("hi", store=False, scope="one", previous_response_id=response["id"])
    assert (await finished(sessions, after))["status"] == "completed"


async def test_warm_ups_in_a_row_add_up(sessions: Sessions, engine: ScriptedEngine) -> None:
    root = await finished(sessions, spec("a"))
    one = await finished(sessions, spec("b", generate=False, previous_response_id=root["id"]))
    two = await finished(sessions, spec("c", generate=False, previous_response_id=one["id"]))
    await finished(sessions, spec("d", previous_response_id=two["id"]))
    assert toy_text(engine.requests[-1]).endswith(
        "<s>assistant\nok<e>\n<s>user\nb<e>\n<s>user\nc<e>\n<s>user\nd<e>\n<s>assistant\n"
    )


# Clients that send everything every time.


async def test_a_history_that_comes_back_as_text_meets_its_own_ids(
    sessions_with_default: Sessions, engine: ScriptedEngine
) -> None:
    tokenizer = default_tokenizer()
    letters = [token for letter in " hello there" for token in tokenizer.encode_text(letter)]
    engine.script = lambda request: [*letters, 2]
    history = [said("system", "Be brief."), said("user", "a")]
    for question in "bcd":
        await finished(sessions_with_default, spec(input=history, store=False))
        history = [*history, said("assistant", "hello there"), said("user", question)]
    await finished(sessions_with_default, spec(input=history, store=False))
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        known = before.prompt_ids + letters
        assert after.prompt_ids[: len(known)] == known
        assert after.branch is None, "nobody can name it, and it must outlive the connection"


async def test_another_owner_does_not_meet_these_ids(
    sessions_with_default: Sessions, engine: ScriptedEngine
) -> None:
    letters = [token for letter in "hello there" for token in default_tokenizer().encode_text(letter)]
    engine.script = lambda request: [*letters, 2]
    await finished(sessions_with_default, spec("a", store=False))
    history = [user("a"), said("assistant", "hello there"), user("b")]
    await finished(sessions_with_default, spec(input=history, store=False, owner="eve"))
    known = engine.requests[0].prompt_ids + letters
    assert engine.requests[1].prompt_ids[: len(known)] != known


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
