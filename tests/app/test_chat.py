"""The terminal's chat: what it sends for each turn, and how it follows the answer."""

import io
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from websockets.sync.connection import Connection

from app.chat import Chat, ChatError

CREATED: dict[str, Any] = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}


def delta(text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "delta": text}


def ending(status: str, response_id: str = "resp_1") -> dict[str, Any]:
    kind = {"completed": "completed", "failed": "failed"}.get(status, "incomplete")
    return {"type": f"response.{kind}", "response": {"id": response_id, "status": status}}


def refusal(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"code": code, "message": message}}


class Server:
    """A connection whose other end says what was written down; None is a pause."""

    def __init__(self, *says: dict[str, Any] | None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._says: Iterator[dict[str, Any] | None] = iter(says)

    def send(self, frame: bytes, text: bool) -> None:
        assert text
        self.sent.append(json.loads(frame))

    def recv(self, timeout: float) -> str:
        event = next(self._says)
        if event is None:
            raise TimeoutError
        return json.dumps(event)


def chat_with(server: Server, instructions: str | None = None) -> Chat:
    return Chat(cast("Connection", server), instructions)


def never() -> bool:
    return False


def test_each_turn_sends_only_its_own_text_and_names_the_one_before() -> None:
    server = Server(CREATED, ending("completed", "a"), ending("incomplete", "b"), ending("completed", "c"))
    chat = chat_with(server, "Be brief.")
    for text in ("one", "two", "three"):
        chat.ask(text, io.StringIO().write, never)
    assert [event["input"] for event in server.sent] == ["one", "two", "three"]
    assert [event.get("previous_response_id") for event in server.sent] == [None, "a", "b"]
    assert {event["instructions"] for event in server.sent} == {"Be brief."}


def test_a_small_model_is_asked_to_keep_to_the_point() -> None:
    server = Server(ending("completed"))
    chat_with(server).ask("hello", io.StringIO().write, never)
    assert server.sent[0]["temperature"] < 1
    assert server.sent[0]["top_p"] < 1


def test_the_answer_is_written_as_it_comes() -> None:
    shown = io.StringIO()
    server = Server(CREATED, delta("The capital"), None, delta(" is Paris."), ending("completed"))
    response = chat_with(server).ask("?", shown.write, never)
    assert shown.getvalue() == "The capital is Paris."
    assert response["status"] == "completed"


def test_a_failed_turn_is_no_parent_of_the_next() -> None:
    server = Server(ending("completed", "a"), ending("failed", "b"), ending("completed", "c"))
    chat = chat_with(server)
    for text in ("one", "two", "three"):
        chat.ask(text, io.StringIO().write, never)
    assert server.sent[2]["previous_response_id"] == "a"


def test_a_new_conversation_has_no_parent() -> None:
    server = Server(ending("completed", "a"), ending("completed", "b"))
    chat = chat_with(server)
    chat.ask("one", io.StringIO().write, never)
    chat.forget()
    chat.ask("two", io.StringIO().write, never)
    assert "previous_response_id" not in server.sent[1]


def test_a_stop_cancels_once_and_waits_for_the_end() -> None:
    server = Server(CREATED, None, delta("half"), ending("cancelled"))
    response = chat_with(server).ask("?", io.StringIO().write, lambda: True)
    assert [event["type"] for event in server.sent] == ["response.create", "response.cancel"]
    assert response["status"] == "cancelled"


def test_a_stop_that_comes_too_late_is_no_error() -> None:
    server = Server(CREATED, refusal("response_not_active", "It has ended."), ending("completed"))
    assert chat_with(server).ask("?", io.StringIO().write, lambda: True)["status"] == "completed"


def test_a_refusal_is_told_in_the_servers_words() -> None:
    with pytest.raises(ChatError, match="does not fit"):
        chat_with(Server(refusal("context_length_exceeded", "It does not fit."))).ask("?", len, never)
