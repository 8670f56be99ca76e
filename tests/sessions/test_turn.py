"""The events of a turn: their order, and that the official client's strict types accept them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from engine.api import PromptUsage, SamplingParams
from sessions.api import Event, TurnSpec
from sessions.eventlog import DELTA
from sessions.response import new_response, usage
from sessions.turn import TurnWriter
from tests.sessions.support import spec

OFFICIAL_EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


def check_strictly(events: list[Event]) -> None:
    """By the types the official client has, and by what its state machine wants of a whole turn."""
    for event in events:
        OFFICIAL_EVENT.validate_python(event, strict=False)
        if "response" in event:
            OfficialResponse.model_validate(event["response"])
    assert events[0]["type"] == "response.created"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def writer(turn_spec: TurnSpec | None = None) -> TurnWriter:
    return TurnWriter(new_response("resp_1", turn_spec or spec(), created_at=1, status="in_progress"))


def finish(turn: TurnWriter, status: Any = "completed", text: str = "", **fields: Any) -> list[Event]:
    turn.finish(status, completed_at=2, text=text, usage=usage(PromptUsage(9, 4, 5), 2), **fields)
    number = turn.terminal_number()
    turn.emit()
    events = turn.log.read(-1)
    assert events[-1]["sequence_number"] == number
    return events


def test_a_whole_turn_in_order() -> None:
    turn = writer()
    turn.created()
    turn.in_progress()
    turn.text("Hel")
    turn.text("lo")
    events = finish(turn, text="Hello")
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    check_strictly(events)
    assert events[0]["sequence_number"] == 0
    assert events[-1]["sequence_number"] == 9
    item = events[2]["item"]
    assert item["content"] == []
    assert item["status"] == "in_progress"
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert response["output"][0]["id"] == item["id"]
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["usage"]["input_tokens_details"] == {
        "cached_tokens": 4,
        "cache_write_tokens": 5,
        "device": 4,
        "computed": 5,
    }
    assert response["usage"]["total_tokens"] == 11


def test_events_show_the_response_as_it_was() -> None:
    turn = writer()
    turn.created()
    turn.in_progress()
    turn.text("x")
    events = finish(turn, text="x")
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None


@pytest.mark.parametrize(
    ("status", "kind", "fields"),
    [
        ("incomplete", "response.incomplete", {"incomplete_reason": "max_output_tokens"}),
        ("cancelled", "response.incomplete", {}),
        ("failed", "response.failed", {"error": {"code": "server_error", "message": "It broke."}}),
    ],
)
def test_other_endings_close_the_item_too(status: str, kind: str, fields: dict[str, Any]) -> None:
    turn = writer()
    turn.created()
    turn.in_progress()
    turn.text("Hel")
    events = finish(turn, status, text="Hel", **fields)
    check_strictly(events)
    assert events[-1]["type"] == kind
    response = events[-1]["response"]
    assert response["status"] == status
    assert response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == (
        {"reason": "max_output_tokens"} if status == "incomplete" else None
    )
    assert response["error"] == fields.get("error")


def test_a_turn_that_ends_before_its_first_token_has_no_item() -> None:
    turn = writer()
    turn.created()
    events = finish(turn, "cancelled")
    check_strictly(events)
    assert [event["type"] for event in events] == ["response.created", "response.incomplete"]
    assert events[-1]["response"]["output"] == []


def test_an_empty_answer_is_an_item_with_empty_text() -> None:
    turn = writer()
    turn.created()
    turn.text("")
    events = finish(turn)
    check_strictly(events)
    assert not any(event["type"] == DELTA for event in events)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("begin", [TurnWriter.queued, TurnWriter.in_progress])
def test_where_a_turn_is_can_be_repeated_until_its_item_begins(begin: Callable[[TurnWriter], None]) -> None:
    turn = writer()
    turn.created()
    turn.response["status"] = "queued" if begin is TurnWriter.queued else "in_progress"
    begin(turn)
    turn.still_waiting()
    assert turn.log.read(0)[0]["type"] == turn.log.read(1)[0]["type"]
    turn.text("x")
    last = turn.log.last
    turn.still_waiting()
    assert turn.log.last == last
    check_strictly(finish(turn, text="x"))


def test_the_response_repeats_the_request_and_nothing_can_pose_as_the_servers_part() -> None:
    echo = {
        "temperature": 0.3,
        "top_p": 0.5,
        "max_output_tokens": 7,
        "user": "u",
        "id": "resp_fake",
        "status": "x",
    }
    turn_spec = spec(
        metadata={"a": "b"},
        instructions="Be brief.",
        conversation_id="conv_1",
        sampling=SamplingParams(temperature=0.3),
        echo=echo,
    )
    response = new_response("resp_1", turn_spec, created_at=1, status="in_progress")
    OfficialResponse.model_validate(response)
    assert response["id"] == "resp_1"
    assert response["status"] == "in_progress"
    assert response["conversation"] == {"id": "conv_1"}
    assert response["instructions"] == "Be brief."
    assert response["metadata"] == {"a": "b"}
    assert response["max_output_tokens"] == 7
