"""From a request body to a `TurnSpec`: what can be asked of sessions, and what has to be refused."""

from __future__ import annotations

from typing import Any

from app.errors import ApiError, unsupported
from app.items import input_items
from app.models import ChatCompletionCreate, ConversationRef, ResponseCreate, Sampling
from engine.api import SamplingParams
from sessions.api import TurnSpec

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SUMMARIES = ("auto", "concise", "detailed")
_VERBOSITIES = ("low", "medium", "high")


def served_model(name: str | None, served: str) -> str:
    if name is not None and name != served:
        message = f"The model {name!r} does not exist here; this server has {served!r}."
        raise ApiError(message, code="model_not_found", status=404, param="model")
    return served


def turn_spec(body: ResponseCreate, *, owner: str, scope: str | None, model: str) -> TurnSpec:
    """What sessions are asked. Raises `ApiError`, or `RequestError` for a sampling value out of range."""
    _refuse_unsupported(body)
    name = served_model(body.model, model)
    generate = body.generate is not False and not (body.prompt_cache_options or {}).get("prewarm")
    items = input_items([] if body.input is None else body.input)
    if generate and not items:
        expected = "a string or a non-empty array of items"
        raise ApiError(f"input is required: {expected}", param="input", code="missing_parameter")
    conversation = body.conversation
    conversation_id = conversation.id if isinstance(conversation, ConversationRef) else conversation
    if conversation_id is not None and body.previous_response_id is not None:
        raise ApiError(
            "conversation and previous_response_id exclude each other: send one of them",
            param="previous_response_id",
        )
    store = body.store is not False
    return TurnSpec(
        owner=owner,
        scope=scope,
        input=items,
        model=name,
        sampling=sampling_params(body, body.max_output_tokens),
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        conversation_id=conversation_id,
        store=store,
        generate=generate,
        detach=body.detach or ("continue" if store else "cancel"),
        client_msg_id=body.client_msg_id,
        metadata=body.metadata or {},
        echo=_echo(body),
    )


def chat_spec(body: ChatCompletionCreate, *, owner: str, scope: str, model: str) -> TurnSpec:
    """A stateless chat completion as a turn that nobody keeps; its KV is still found again by its tokens."""
    _refuse_unsupported_chat(body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return TurnSpec(
        owner=owner,
        scope=scope,
        input=input_items(body.messages, "messages"),
        model=served_model(body.model, model),
        sampling=sampling_params(body, limit),
        store=False,
        detach="cancel",
    )


def sampling_params(body: Sampling, max_tokens: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "ignore_eos": body.ignore_eos,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(seed=body.seed, stop=stop, max_tokens=max_tokens, **chosen)


def _refuse_unsupported(body: ResponseCreate) -> None:
    if body.background:
        raise unsupported("background", "a stored response already goes on when its watcher leaves")
    _refuse_tools(body.tools, body.tool_choice)
    if body.truncation == "auto":
        raise unsupported("truncation", 'only "disabled": nothing is dropped from a conversation')
    if body.context_management:
        raise unsupported("context_management", "there is no compaction yet")
    if body.top_logprobs:
        raise unsupported("top_logprobs", "log probabilities are not computed")
    _refuse_format("text.format", (body.text or {}).get("format"))


def _refuse_unsupported_chat(body: ChatCompletionCreate) -> None:
    _refuse_tools(body.tools, body.tool_choice)
    _refuse_tools(body.functions, None, "functions")
    if body.logprobs or body.top_logprobs:
        raise unsupported("logprobs", "log probabilities are not computed")
    if body.logit_bias:
        raise unsupported("logit_bias", "the sampler does not take one")
    _refuse_format("response_format", body.response_format)


def _refuse_tools(tools: list[Any] | None, choice: str | dict[str, Any] | None, name: str = "tools") -> None:
    if tools:
        raise unsupported(name, "this server does not call tools yet; send none, or an empty array")
    if choice is not None and choice not in ("auto", "none"):
        raise unsupported("tool_choice", 'without tools only "auto" and "none" have a meaning')


def _refuse_format(param: str, wanted: Any) -> None:
    if wanted is None:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind != "text":
        raise unsupported(param, 'only {"type": "text"}: answers are not held to a schema yet')


def _echo(body: ResponseCreate) -> dict[str, Any]:
    """What the response object repeats of the request, in the forms its strict types want."""
    text = body.text or {}
    reasoning = body.reasoning or {}
    verbosity = _one_of(text.get("verbosity"), _VERBOSITIES)
    return {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}} | ({"verbosity": verbosity} if verbosity else {}),
        "reasoning": {
            "effort": _one_of(reasoning.get("effort"), _EFFORTS),
            "summary": _one_of(reasoning.get("summary"), _SUMMARIES),
        },
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "user": body.user,
        "background": False,
    }


def _one_of(value: Any, known: tuple[str, ...]) -> str | None:
    return value if isinstance(value, str) and value in known else None
