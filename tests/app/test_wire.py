import json
from typing import Any

import msgpack
import pytest

from app.errors import ApiError
from app.wire import Attach, Cancel, Codec, Create, FrameError, Ping, Quiet, parse_event

BAD_FRAMES: list[tuple[Any, str, str | None, str]] = [
    ([], "invalid_request", "the frame", "the frame must be an object with a type, got an array of 0"),
    ("x", "invalid_request", "the frame", 'the frame must be an object with a type, got "x"'),
    ({}, "unknown_event_type", "type", "type is required: the name of an event"),
    (
        {"type": "no.such"},
        "unknown_event_type",
        "type",
        "type must be one of response.create, response.cancel, response.attach, ping, conversation.open, "
        'response.processed, got "no.such"',
    ),
    ({"type": ["ping"]}, "unknown_event_type", "type", "got an array of 1"),
    (
        {"type": "response.cancel", "response_id": 4},
        "invalid_request",
        "response_id",
        "the id of a response, got 4",
    ),
    (
        {"type": "response.attach"},
        "missing_parameter",
        "response_id",
        "response_id is required: the id of a response",
    ),
    (
        {"type": "response.attach", "response_id": "r", "starting_after": -2},
        "invalid_request",
        "starting_after",
        "starting_after must be a sequence number of at least 0, or -1 for everything, got -2",
    ),
]


@pytest.mark.parametrize(("frame", "code", "param", "message"), BAD_FRAMES, ids=lambda value: str(value)[:50])
def test_a_bad_frame_is_refused(frame: Any, code: str, param: str | None, message: str) -> None:
    with pytest.raises(FrameError) as caught:
        parse_event(frame)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.param) == (code, param)
    assert message in refusal.message


@pytest.mark.parametrize("stream_id", ["", "a b", "x" * 257, "ü", 5, ["a"], "a\n"])
def test_an_invalid_stream_id_is_refused_without_a_lane(stream_id: Any) -> None:
    with pytest.raises(FrameError) as caught:
        parse_event({"type": "response.create", "input": "x", "stream_id": stream_id})
    assert caught.value.refusal.code == "invalid_stream_id"
    assert caught.value.stream_id is None


def test_a_refusal_belongs_to_the_lane_of_its_frame() -> None:
    with pytest.raises(FrameError) as caught:
        parse_event({"type": "no.such", "stream_id": "a"})
    assert caught.value.stream_id == "a"


def test_client_events_are_recognised() -> None:
    create = {"type": "response.create", "input": "x", "stream_id": "a"}
    assert parse_event(create) == Create(create, "a")
    assert parse_event({"type": "response.create", "response": {"input": "x", "stream_id": "b"}}) == Create(
        {"input": "x", "stream_id": "b"}, "b"
    )
    assert parse_event({"type": "response.cancel"}) == Cancel(None, None)
    assert parse_event({"type": "response.cancel", "response_id": "r", "stream_id": "a"}) == Cancel("r", "a")
    assert parse_event({"type": "response.attach", "response_id": "r"}) == Attach("r", -1, None)
    assert parse_event({"type": "response.attach", "response_id": "r", "starting_after": 5}) == Attach(
        "r", 5, None
    )
    assert parse_event({"type": "ping"}) == Ping()
    assert parse_event({"type": "response.processed", "response_id": "r"}) == Quiet()


@pytest.mark.parametrize("text", ["", "{", "nonsense", '{"a": NaN}', "[" * 5000, '"\\ud800"', "\x00"])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        Codec(binary=False).decode(text)
    assert caught.value.code == "invalid_json"


def test_binary_frames_need_the_subprotocol() -> None:
    with pytest.raises(ApiError) as caught:
        Codec(binary=False).decode(b"\x00\x01")
    assert caught.value.code == "unsupported_message_type"


NO_TEXT_KEYS = [
    msgpack.packb(value) for value in ({b"type": "ping"}, {"type": "ping", "a": [{b"b": 1}]}, {1: 2})
]


@pytest.mark.parametrize(
    "junk", [b"", b"\xc1", b"\x81", b"\x91" * 5000, b"\xa2\xff\xff", b"\x01\x02", *NO_TEXT_KEYS]
)
def test_bytes_that_are_no_msgpack_are_refused(junk: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        Codec(binary=True).decode(junk)
    assert caught.value.code == "invalid_msgpack"


def test_both_codecs_carry_the_same_events() -> None:
    event = {"type": "x", "text": "naïve ✓", "n": 1, "list": [1.5, None, True]}
    assert json.loads(Codec(binary=False).encode(event)) == event
    assert msgpack.unpackb(Codec(binary=True).encode(event)) == event
    assert Codec(binary=True).decode(msgpack.packb(event)) == event
    # A client of the binary kind may still send text.
    assert Codec(binary=True).decode(json.dumps(event)) == event
