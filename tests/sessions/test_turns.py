"""Turns and the prompts they make."""

from __future__ import annotations

import pytest

from engine.api import SamplingParams
from sessions import Sessions
from tests.sessions.asking import CLOSING, new_part, toy_text
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
from tests.sessions.test_turn import check_strictly

pytestmark = pytest.mark.anyio


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
