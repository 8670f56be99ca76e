"""The requests a client may send. A field's description is what an error says it expects."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.errors import ApiError, wrong

log = structlog.get_logger()

STREAM_ID = r"^[A-Za-z0-9_.-]{1,256}$"
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256

Id = Annotated[str, Field(min_length=1, max_length=128)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
Number = Annotated[float, Field(allow_inf_nan=False)]

STOP_EXPECTED = (
    f"a string or an array of at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} characters"
)
METADATA_EXPECTED = "an object of at most 16 strings, keys up to 64 characters and values up to 512"


def field(expected: str, default: Any = None, **more: Any) -> Any:
    return Field(default, description=expected, **more)


class Request(BaseModel):
    """Strict types: "1" is not a number. Fields that are not known are ignored, and named in the log."""

    model_config = ConfigDict(strict=True, extra="allow")


class Sampling(Request):
    """The fields that choose tokens; ranges are checked by `engine.api.SamplingParams`."""

    temperature: Number | None = field("a number from 0 to 100")
    top_p: Number | None = field("a number above 0 and up to 1")
    top_k: int | None = field("0 (off) or a positive whole number")
    min_p: Number | None = field("a number from 0 to below 1")
    seed: int | None = field("a 64-bit whole number")
    stop: Stop | None = field(STOP_EXPECTED)
    ignore_eos: bool | None = field("true or false")
    presence_penalty: Number | None = field("a number from -2 to 2")
    frequency_penalty: Number | None = field("a number from -2 to 2")


class ConversationRef(Request):
    id: Id


class ResponseCreate(Sampling):
    """The body of `response.create` and of `POST /v1/responses`."""

    model: str | None = field("the name of a served model", max_length=256)
    input: str | list[Any] | None = field("a string or an array of items")
    instructions: str | None = field("a string")
    previous_response_id: Id | None = field("the id of a response")
    conversation: Id | ConversationRef | None = field("the id of a conversation, or an object with its id")
    store: bool | None = field("true or false")
    generate: bool | None = field("true or false")
    stream: bool | None = field("true or false")
    background: bool | None = field("true or false")
    stream_id: str | None = field("1 to 256 letters, digits, '_', '.' or '-'", pattern=STREAM_ID)
    max_output_tokens: int | None = field("a whole number of at least 1", ge=1)
    metadata: Metadata | None = field(METADATA_EXPECTED)
    # Extensions of ours.
    client_msg_id: Id | None = field("a string of 1 to 128 characters")
    detach: Literal["continue", "cancel"] | None = field('"continue" or "cancel"')
    # Known, and refused unless they ask for nothing this server lacks: see `app.wire`.
    top_logprobs: int | None = field("a whole number from 0 to 20", ge=0, le=20)
    text: dict[str, Any] | None = field("an object")
    tools: list[Any] | None = field("an array")
    tool_choice: str | dict[str, Any] | None = field('"none", "auto" or "required"')
    truncation: Literal["auto", "disabled"] | None = field('"auto" or "disabled"')
    include: list[str] | None = field("an array of strings")
    context_management: list[Any] | None = field("an array")
    prompt_cache_options: dict[str, Any] | None = field("an object")
    # Accepted; repeated in the response where it has such a field, and otherwise without effect.
    parallel_tool_calls: bool | None = field("true or false")
    max_tool_calls: int | None = field("a whole number")
    reasoning: dict[str, Any] | None = field("an object")
    stream_options: dict[str, Any] | None = field("an object")
    prompt_cache_key: str | None = field("a string")
    prompt_cache_retention: str | None = field("a string")
    user: str | None = field("a string")
    safety_identifier: str | None = field("a string")
    service_tier: str | None = field("a string")
    prompt: Any = field("anything")
    moderation: Any = field("anything")
    access_programs: Any = field("anything")
    client_metadata: Any = field("anything")


class ChatCompletionCreate(Sampling):
    """The body of `POST /v1/chat/completions`."""

    model: str | None = field("the name of a served model", max_length=256)
    messages: list[Any] = field("a non-empty array of messages", ..., min_length=1)
    stream: bool | None = field("true or false")
    stream_options: dict[str, Any] | None = field("an object")
    max_tokens: int | None = field("a whole number of at least 1", ge=1)
    max_completion_tokens: int | None = field("a whole number of at least 1", ge=1)
    n: int | None = field("1", ge=1, le=1)
    tools: list[Any] | None = field("an array")
    functions: list[Any] | None = field("an array")
    tool_choice: str | dict[str, Any] | None = field('"none", "auto" or "required"')
    response_format: dict[str, Any] | None = field("an object")
    logprobs: bool | None = field("true or false")
    top_logprobs: int | None = field("a whole number from 0 to 20", ge=0, le=20)
    logit_bias: dict[str, Any] | None = field("an object")
    # Accepted and without effect.
    metadata: Any = field("anything")
    store: Any = field("anything")
    user: Any = field("anything")
    reasoning_effort: Any = field("anything")
    reasoning: Any = field("anything")
    verbosity: Any = field("anything")
    service_tier: Any = field("anything")
    parallel_tool_calls: Any = field("anything")
    prompt_cache_key: Any = field("anything")
    prompt_cache_options: Any = field("anything")
    safety_identifier: Any = field("anything")
    modalities: Any = field("anything")


class ResponseCancel(Request):
    response_id: Id | None = field("the id of a response")
    stream_id: str | None = field("1 to 256 letters, digits, '_', '.' or '-'", pattern=STREAM_ID)


class ResponseAttach(Request):
    response_id: Id = field("the id of a response", ...)
    starting_after: int | None = field("a sequence number of at least 0, or -1 for everything", ge=-1)
    stream_id: str | None = field("1 to 256 letters, digits, '_', '.' or '-'", pattern=STREAM_ID)


class ConversationCreate(Request):
    items: list[Any] | None = field("an array of at most 20 items", max_length=20)
    metadata: Metadata | None = field(METADATA_EXPECTED)


class ConversationUpdate(Request):
    metadata: Metadata = field(METADATA_EXPECTED, ...)
    rev: int | None = field("the revision the change is made to")


class Login(Request):
    key: str = field("an API key", ..., min_length=1, max_length=512)


Model = TypeVar("Model", bound=Request)


def validate(model: type[Model], data: Any, what: str = "the request body") -> Model:
    """`data` as a `model`. Raises `ApiError` that names the first wrong field and what it should be."""
    if not isinstance(data, dict):
        raise wrong(what, "a JSON object", data)
    try:
        request = model.model_validate(data)
    except ValidationError as exc:
        name = str(exc.errors(include_url=False, include_context=False)[0]["loc"][0])
        expected = model.model_fields[name].description or "another value"
        if name not in data:
            raise ApiError(f"{name} is required: {expected}", param=name, code="missing_parameter") from None
        code = "invalid_stream_id" if name == "stream_id" else "invalid_request"
        raise wrong(name, expected, data[name], code=code) from None
    unknown = sorted((request.model_extra or {}).keys() - {"type", "response", "event_id"})
    if unknown:
        log.warning("unknown request fields ignored", fields=[name[:40] for name in unknown[:10]])
    return request
