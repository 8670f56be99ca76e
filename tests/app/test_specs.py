# ruff: noqa: E501 - a row of a table is one line
from typing import Any

import pytest

from app.errors import ApiError, as_refusal
from app.models import ChatCompletionCreate, ResponseCreate, validate
from app.specs import chat_spec, turn_spec
from engine.api import RequestError
from sessions.api import SessionError, TurnSpec

MODEL = "tiny"


def spec_of(**fields: Any) -> TurnSpec:
    body = validate(ResponseCreate, {"type": "response.create", "input": "hi", **fields}, "response")
    return turn_spec(body, owner="me", scope="ws_1", model=MODEL)


def chat_of(**fields: Any) -> TurnSpec:
    body = validate(ChatCompletionCreate, {"messages": [{"role": "user", "content": "hi"}], **fields})
    return chat_spec(body, owner="me", scope="chat_1", model=MODEL)


def refusal_of(build: Any, **fields: Any) -> SessionError:
    with pytest.raises((ApiError, RequestError)) as caught:
        build(**fields)
    return as_refusal(caught.value)


LONG = "x" * 600

BAD_FIELDS: list[tuple[dict[str, Any], str, str, str]] = [
    # fields, param, code, message
    ({"input": 5}, "input", "invalid_request", "input must be a string or an array of items, got 5"),
    (
        {"input": None},
        "input",
        "missing_parameter",
        "input is required: a string or a non-empty array of items",
    ),
    (
        {"input": []},
        "input",
        "missing_parameter",
        "input is required: a string or a non-empty array of items",
    ),
    ({"input": ["hi"]}, "input[0]", "invalid_request", 'input[0] must be an object, got "hi"'),
    (
        {"input": [{"role": "robot", "content": "x"}]},
        "input[0].role",
        "invalid_request",
        'input[0].role must be one of user, assistant, system, developer, got "robot"',
    ),
    (
        {"input": [{"role": ["user"], "content": "x"}]},
        "input[0].role",
        "invalid_request",
        "input[0].role must be one of user, assistant, system, developer, got an array of 1",
    ),
    (
        {"input": [{"role": "user", "content": 7}]},
        "input[0].content",
        "invalid_request",
        "input[0].content must be a string or an array of text parts, got 7",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]},
        "input[0].content[0].text",
        "invalid_request",
        "input[0].content[0].text must be a string, got null",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "unsupported_content",
        "input[0].content[0].type 'input_image' is not supported: the model reads text only",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].type",
        "unsupported_item_type",
        "input[0].type 'function_call_output' is not supported: this server takes messages only",
    ),
    (
        {"model": "other"},
        "model",
        "model_not_found",
        "The model 'other' does not exist here; this server has 'tiny'.",
    ),
    ({"model": 5}, "model", "invalid_request", "model must be the name of a served model, got 5"),
    ({"instructions": 5}, "instructions", "invalid_request", "instructions must be a string, got 5"),
    ({"store": "yes"}, "store", "invalid_request", 'store must be true or false, got "yes"'),
    ({"generate": 1}, "generate", "invalid_request", "generate must be true or false, got 1"),
    (
        {"max_output_tokens": 0},
        "max_output_tokens",
        "invalid_request",
        "max_output_tokens must be a whole number of at least 1, got 0",
    ),
    (
        {"max_output_tokens": -1},
        "max_output_tokens",
        "invalid_request",
        "max_output_tokens must be a whole number of at least 1, got -1",
    ),
    (
        {"max_output_tokens": "many"},
        "max_output_tokens",
        "invalid_request",
        'max_output_tokens must be a whole number of at least 1, got "many"',
    ),
    (
        {"max_output_tokens": 1.5},
        "max_output_tokens",
        "invalid_request",
        "max_output_tokens must be a whole number of at least 1, got 1.5",
    ),
    (
        {"temperature": "hot"},
        "temperature",
        "invalid_request",
        'temperature must be a number from 0 to 100, got "hot"',
    ),
    (
        {"temperature": True},
        "temperature",
        "invalid_request",
        "temperature must be a number from 0 to 100, got true",
    ),
    (
        {"temperature": -0.5},
        "temperature",
        "invalid_request",
        "temperature must be a number from 0 to 100, got -0.5",
    ),
    ({"top_p": 0}, "top_p", "invalid_request", "top_p must be a number above 0 and up to 1, got 0.0"),
    ({"top_k": -2}, "top_k", "invalid_request", "top_k must be 0 (off) or a positive whole number, got -2"),
    ({"min_p": 1}, "min_p", "invalid_request", "min_p must be a number from 0 to below 1, got 1.0"),
    ({"seed": 2**70}, "seed", "invalid_request", f"seed must be a 64-bit whole number, got {2**70}"),
    ({"seed": "s"}, "seed", "invalid_request", 'seed must be a 64-bit whole number, got "s"'),
    (
        {"presence_penalty": 3},
        "presence_penalty",
        "invalid_request",
        "presence_penalty must be a number from -2 to 2, got 3.0",
    ),
    (
        {"stop": ["a", ""]},
        "stop",
        "invalid_request",
        "stop must be a string or an array of at most 16 strings, each of 1 to 256 characters, got an array of 2",
    ),
    (
        {"metadata": {"k": 1}},
        "metadata",
        "invalid_request",
        "metadata must be an object of at most 16 strings, keys up to 64 characters and values up to 512, "
        "got an object",
    ),
    (
        {"metadata": {"k": LONG}},
        "metadata",
        "invalid_request",
        "metadata must be an object of at most 16 strings, keys up to 64 characters and values up to 512, "
        "got an object",
    ),
    (
        {"previous_response_id": 3},
        "previous_response_id",
        "invalid_request",
        "previous_response_id must be the id of a response, got 3",
    ),
    (
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
        "invalid_request",
        "conversation and previous_response_id exclude each other: send one of them",
    ),
    (
        {"conversation": {"name": "x"}},
        "conversation",
        "invalid_request",
        "conversation must be the id of a conversation, or an object with its id, got an object",
    ),
    ({"detach": "never"}, "detach", "invalid_request", 'detach must be "continue" or "cancel", got "never"'),
    (
        {"tools": [{"type": "function", "name": "f"}]},
        "tools",
        "unsupported_parameter",
        "tools is not supported: this server does not call tools yet; send none, or an empty array",
    ),
    (
        {"tool_choice": "required"},
        "tool_choice",
        "unsupported_parameter",
        'tool_choice is not supported: without tools only "auto" and "none" have a meaning',
    ),
    (
        {"truncation": "auto"},
        "truncation",
        "unsupported_parameter",
        'truncation is not supported: only "disabled": nothing is dropped from a conversation',
    ),
    (
        {"background": True},
        "background",
        "unsupported_parameter",
        "background is not supported: a stored response already goes on when its watcher leaves",
    ),
    (
        {"text": {"format": {"type": "json_object"}}},
        "text.format",
        "unsupported_parameter",
        'text.format is not supported: only {"type": "text"}: answers are not held to a schema yet',
    ),
    (
        {"top_logprobs": 3},
        "top_logprobs",
        "unsupported_parameter",
        "top_logprobs is not supported: log probabilities are not computed",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"), BAD_FIELDS, ids=lambda value: str(value)[:50]
)
def test_a_bad_field_is_named_with_what_was_expected(
    fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    refusal = refusal_of(spec_of, **fields)
    assert (refusal.param, refusal.code, refusal.message) == (param, code, message)
    assert refusal.status == (404 if code == "model_not_found" else 400)
    assert refusal.type == "invalid_request_error"


def test_a_string_is_one_user_message() -> None:
    assert spec_of(input="hi").input == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    ]


def test_items_of_all_accepted_forms_come_out_in_one_form() -> None:
    given = [
        {"role": "system", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": [1]}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    made = spec_of(input=given).input
    assert [(item["role"], item["content"][0]["type"], item["content"][0]["text"]) for item in made] == [
        ("system", "input_text", "be brief"),
        ("user", "input_text", "a"),
        ("assistant", "output_text", "b"),
        ("assistant", "output_text", "no"),
    ]


def test_defaults_of_a_turn() -> None:
    spec = spec_of()
    assert (spec.model, spec.store, spec.generate, spec.detach) == (MODEL, True, True, "continue")
    assert (spec.owner, spec.scope, spec.metadata) == ("me", "ws_1", {})
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens) == (1.0, 1.0, None)


def test_a_turn_that_is_not_stored_ends_with_its_watcher_unless_it_says_otherwise() -> None:
    assert spec_of(store=False).detach == "cancel"
    assert spec_of(store=False, detach="continue").detach == "continue"
    assert spec_of(detach="cancel").detach == "cancel"


def test_sampling_fields_reach_the_sampler() -> None:
    spec = spec_of(
        temperature=0, top_p=0.5, top_k=4, min_p=0.1, seed=7, stop="END", max_output_tokens=9, ignore_eos=True
    )
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 4, 0.1)
    assert (sampling.seed, sampling.stop, sampling.max_tokens, sampling.ignore_eos) == (7, ("END",), 9, True)


def test_a_warm_up_may_have_no_input() -> None:
    assert spec_of(generate=False, input=[]).input == []
    assert spec_of(prompt_cache_options={"prewarm": True}).generate is False


def test_fields_without_effect_are_taken_and_repeated_where_the_response_has_them() -> None:
    spec = spec_of(
        tools=[],
        tool_choice="none",
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "weird"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        stream=True,
        stream_options={"include_obfuscation": False},
        user="u",
        service_tier="flex",
        client_metadata={"a": 1},
        prompt_cache_key="k",
        something_new=3,
    )
    assert spec.echo["tool_choice"] == "none"
    assert spec.echo["parallel_tool_calls"] is False
    assert spec.echo["reasoning"] == {"effort": "low", "summary": None}
    assert spec.echo["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (spec.echo["user"], spec.echo["prompt_cache_key"]) == ("u", "k")


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages must be a non-empty array of messages, got an array of 0"),
    ({"messages": "hi"}, "messages", 'messages must be a non-empty array of messages, got "hi"'),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role",
        "one of user, assistant, system, developer",
    ),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "got null"),
    ({"n": 2}, "n", "n must be 1, got 2"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be a whole number of at least 1, got 0"),
    ({"logprobs": True}, "logprobs", "log probabilities are not computed"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "the sampler does not take one"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "answers are not held to a schema yet"),
    ({"tools": [{}]}, "tools", "this server does not call tools yet"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD_CHATS, ids=lambda value: str(value)[:50])
def test_a_bad_chat_completion_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    refusal = refusal_of(chat_of, **fields)
    assert refusal.param == param
    assert message in refusal.message


def test_a_missing_body_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        validate(ChatCompletionCreate, {"model": "x"})
    assert caught.value.message == "messages is required: a non-empty array of messages"


def test_what_chat_clients_send_is_taken() -> None:
    spec = chat_of(
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        max_tokens=50,
        max_completion_tokens=40,
        frequency_penalty=0,
        presence_penalty=0,
        reasoning_effort="low",
        seed=1,
        stop=["a"],
        logit_bias={},
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        n=1,
        logprobs=False,
        user="u",
        store=False,
        verbosity="low",
        parallel_tool_calls=True,
        service_tier="auto",
        custom_field={"x": 1},
    )
    assert (spec.store, spec.detach, spec.sampling.max_tokens) == (False, "cancel", 40)
    assert spec.input[0]["content"] == [{"type": "input_text", "text": "hi"}]
