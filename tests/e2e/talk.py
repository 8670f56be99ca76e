"""Turns over the SDK's websocket, each frame checked against the SDK's own strict types."""

from __future__ import annotations

import json
from typing import Any

from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter

MODEL = "smollm2-135m-instruct"
ENDINGS = ("response.completed", "response.incomplete", "response.failed", "error")

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


def send(connection: ResponsesConnection, **fields: Any) -> None:
    body = {"type": "response.create", "model": MODEL, "temperature": 0, **fields}
    connection.send(body)  # type: ignore[arg-type]  # extensions are no part of its types


def receive(connection: ResponsesConnection) -> Any:
    frame = json.loads(connection.recv_bytes())
    return EVENTS.validate_python(frame)


def finish(connection: ResponsesConnection) -> list[Any]:
    """Every event up to a turn's end. Their order and numbers are checked here, once for all tests."""
    events: list[Any] = []
    while not events or events[-1].type not in ENDINGS:
        events.append(receive(connection))
    if events[-1].type == "error":
        return events
    if events[0].type == "response.created":
        check_order([event.type for event in events])
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    return events


def check_order(kinds: list[str]) -> None:
    text = [kind for kind in kinds if kind not in ("response.in_progress", "response.queued")]
    middle = text[1:-1]
    if middle:
        assert middle[:2] == ["response.output_item.added", "response.content_part.added"]
        assert middle[-3:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert set(middle[2:-3]) <= {"response.output_text.delta"}


def turn(connection: ResponsesConnection, text: str, **fields: Any) -> Response:
    """One completed or incomplete turn."""
    send(connection, input=text, **fields)
    last = finish(connection)[-1]
    assert last.type in ("response.completed", "response.incomplete"), last
    response: Response = last.response
    return response


def refusal(connection: ResponsesConnection) -> tuple[int | None, str | None]:
    """Status and code of an `error` frame that must come next."""
    event = receive(connection)
    assert event.type == "error", event
    assert event.error.message
    return event.status, event.error.code
