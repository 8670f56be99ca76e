"""Frames to client events and back: decoding and validation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson

from app.errors import ApiError, wrong
from app.models import STREAM_ID, ResponseAttach, ResponseCancel, validate
from sessions.api import Event, SessionError

MSGPACK_SUBPROTOCOL = "pageturner.v1+msgpack"

_STREAM_ID = re.compile(STREAM_ID)
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
