"""Frames to client events and back: decoding, validation, and from a request body to a `TurnSpec`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson

from app.errors import ApiError, unsupported, wrong
from app.items import input_items
from app.models import (
    STREAM_ID,
    ChatCompletionCreate,
    ConversationRef,
    ResponseAttach,
    ResponseCancel,
    ResponseCreate,
    Sampling,
    validate,
)
from engine.api import SamplingParams
from sessions.api import Event, SessionError, TurnSpec

MSGPACK_SUBPROTOCOL = "pageturner.v1+msgpack"

_STREAM_ID = re.compile(STREAM_ID)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SUMMARIES = ("auto", "concise", "detailed")
_VERBOSITIES = ("low", "medium", "high")
_QUIET_EVENTS = frozenset({"response.processed", "conversation.open"})
_EVENTS = ("response.create", "response.cancel", "response.attach", "ping", *sorted(_QUIET_EVENTS))


@dataclass(frozen=True, slots=True)
class Create:
    """A turn that is asked for. Its body is checked when the lane reaches it: refusals keep their order."""

    body: Any
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class Cancel:
    response_id: str | None
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class Attach:
    response_id: str
    starting_after: int
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Quiet:
    """An event that is accepted and asks for nothing."""


ClientEvent = Create | Cancel | Attach | Ping | Quiet


class FrameError(Exception):
    """A frame that is refused, with the lane its answer belongs to (None: the default lane)."""

    def __init__(self, refusal: SessionError, stream_id: str | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.stream_id = stream_id


class Codec:
    """How events are written on one connection: JSON in text frames, or msgpack in binary ones."""

    def __init__(self, *, binary: bool) -> None:
        self.binary = binary

    def encode(self, event: Event) -> bytes:
        if self.binary:
            packed: bytes = msgpack.packb(event)
            return packed
        return orjson.dumps(event)

    def decode(self, frame: str | bytes) -> Any:
        """The value in a frame. Raises `ApiError` for one that is not of this connection's kind."""
        if isinstance(frame, str):
            return decode_json(frame)
        if not self.binary:
            raise ApiError(
                f"Binary frames need the subprotocol {MSGPACK_SUBPROTOCOL}; send JSON in text frames.",
                code="unsupported_message_type",
            )
        try:
            return msgpack.unpackb(frame, object_pairs_hook=_text_keys)
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
            raise ApiError("The frame is not valid msgpack.", code="invalid_msgpack") from None


def _text_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """A map of msgpack as the object JSON could have said. Raises `ValueError` for keys that are no text."""
    if not all(isinstance(key, str) for key, _ in pairs):
        raise ValueError("a key is not a string")
    return dict(pairs)


def decode_json(text: str | bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise ApiError(
            f"Not valid JSON: {exc.msg} at line {exc.lineno} column {exc.colno}.", code="invalid_json"
        ) from None


def parse_event(data: Any) -> ClientEvent:
    """One decoded frame as a client event. Raises `FrameError`."""
    if not isinstance(data, dict):
        raise FrameError(wrong("the frame", "an object with a type", data))
    nested = data.get("response")
    body = nested if isinstance(nested, dict) and data.get("type") == "response.create" else data
    stream_id = data.get("stream_id", body.get("stream_id"))
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        expected = "1 to 256 letters, digits, '_', '.' or '-'"
        raise FrameError(wrong("stream_id", expected, stream_id, code="invalid_stream_id"))
    try:
        return _event(data, stream_id)
    except ApiError as exc:
        raise FrameError(exc, stream_id) from None


def _event(data: dict[str, Any], stream_id: str | None) -> ClientEvent:
    kind = data.get("type")
    if kind == "response.create":
        # Some clients put the body one level deeper.
        return Create(data.get("response", data), stream_id)
    if kind == "response.cancel":
        cancel = validate(ResponseCancel, data)
        return Cancel(cancel.response_id, stream_id)
    if kind == "response.attach":
        attach = validate(ResponseAttach, data)
        after = -1 if attach.starting_after is None else attach.starting_after
        return Attach(attach.response_id, after, stream_id)
    if kind == "ping":
        return Ping()
    if isinstance(kind, str) and kind in _QUIET_EVENTS:
        return Quiet()
    if kind is None:
        raise ApiError("type is required: the name of an event", param="type", code="unknown_event_type")
    raise wrong("type", "one of " + ", ".join(_EVENTS), kind, code="unknown_event_type")


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
