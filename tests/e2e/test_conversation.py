"""What the server is for: conversations that pay for their new text only."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
from openai import OpenAI
from openai.types.responses import Response
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2e.server import ServerProcess
from tests.e2e.talk import MODEL, finish, receive, send, turn

BLOCK = 16


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def used_blocks(metrics: dict[str, float]) -> float:
    return metrics["kv_blocks.total"] - metrics["kv_blocks.free"]


def test_five_turns_pay_for_their_new_text_only(client: OpenAI) -> None:
    questions = [
        "What is the capital of France?",
        "And of Italy?",
        "Name one river there.",
        "What colour is the sky?",
        "Thank you. Say goodbye.",
    ]
    with client.responses.connect() as connection:
        before: Response | None = None
        for question in questions:
            response = turn(
                connection,
                question,
                max_output_tokens=40,
                previous_response_id=None if before is None else before.id,
            )
            assert response.usage is not None
            usage = response.usage
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            if before is None:
                assert "Paris" in response.output_text
            else:
                assert before.usage is not None
                context = before.usage.input_tokens + before.usage.output_tokens
                new = usage.input_tokens - context
                assert new > 0
                # The last token of an answer was sampled and never computed.
                assert usage.input_tokens - cached(response) - new in (0, 1)
                assert response.previous_response_id == before.id
            before = response


def test_the_model_is_served_under_its_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_same_system_prompt_is_kept_once(client: OpenAI, server: ServerProcess) -> None:
    system = " ".join(f"Rule {number}: be kind, be brief, and tell the truth." for number in range(25))
    with client.responses.connect() as connection:
        first = turn(connection, "Hello, my name is Ada.", instructions=system, max_output_tokens=8)
        after_one = server.wait_until_idle()
        second = turn(connection, "Which day is it?", instructions=system, max_output_tokens=8)
        after_two = server.wait_until_idle()
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.input_tokens > 300
    shared = cached(second) // BLOCK
    assert shared >= 300 // BLOCK
    whole = -(-(second.usage.input_tokens + second.usage.output_tokens) // BLOCK)
    assert used_blocks(after_two) - used_blocks(after_one) <= whole - shared
    assert after_two["kv_blocks.shared"] >= after_one["kv_blocks.shared"] + shared


def test_a_fork_of_two_thousand_tokens_adds_one_block(client: OpenAI, server: ServerProcess) -> None:
    words = " ".join(["story"] * 1970)
    with client.responses.connect() as connection:
        probe = turn(connection, words, store=False, max_output_tokens=1)
        assert probe.usage is not None
        # Such that the last block has room for a short turn, in the original and in the fork.
        words += " story" * ((1 - probe.usage.input_tokens) % BLOCK)
        trunk = turn(connection, words, max_output_tokens=1)
        assert trunk.usage is not None
        assert trunk.usage.input_tokens >= 2000 - BLOCK
        assert trunk.usage.input_tokens % BLOCK == 1
        original = turn(connection, "a", previous_response_id=trunk.id, max_output_tokens=1)
        before = server.wait_until_idle()
        fork = turn(connection, "b", previous_response_id=trunk.id, max_output_tokens=1)
        after = server.wait_until_idle()
    assert original.usage is not None
    assert fork.usage is not None
    assert original.usage.input_tokens == fork.usage.input_tokens <= trunk.usage.input_tokens + BLOCK - 1
    assert cached(fork) >= trunk.usage.input_tokens - 1
    assert used_blocks(after) - used_blocks(before) == 1


def test_a_fork_goes_its_own_way(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        trunk = turn(connection, "My favourite colour is green.", max_output_tokens=8)
        send(
            connection, input="What is my favourite colour?", previous_response_id=trunk.id, stream_id="fork"
        )
        send(connection, input="2 + 2 =", previous_response_id=trunk.id, max_output_tokens=30)
        ends: dict[str | None, Response] = {}
        while len(ends) < 2:
            event = receive(connection)
            if event.type in ("response.completed", "response.incomplete"):
                ends[getattr(event, "stream_id", None)] = event.response
    assert trunk.usage is not None
    for end in ends.values():
        assert end.previous_response_id == trunk.id
        assert cached(end) >= trunk.usage.input_tokens
    assert ends["fork"].output_text != ends[None].output_text


def test_a_warm_up_computes_and_says_nothing(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        send(connection, input="My dog is called Rex.", generate=False)
        events = finish(connection)
        assert [event.type for event in events] == ["response.created", "response.completed"]
        warm = events[-1].response
        assert warm.output == []
        response = turn(
            connection, "What is my dog called?", previous_response_id=warm.id, max_output_tokens=20
        )
        assert cached(response) >= warm.usage.input_tokens - 1
        assert "Rex" in response.output_text


def test_a_cancelled_turn_can_be_gone_on_from(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        send(
            connection,
            input="Write a very long story about the sea.",
            ignore_eos=True,
            max_output_tokens=2000,
        )
        response_id = ""
        while (event := receive(connection)).type != "response.output_text.delta":
            if event.type == "response.created":
                response_id = event.response.id
        connection.send({"type": "response.cancel", "response_id": response_id})  # type: ignore[arg-type]
        while (event := receive(connection)).type != "response.incomplete":
            pass
        assert event.response.status == "cancelled"
        assert event.response.output[0].status == "incomplete"
        assert turn(connection, "Go on.", previous_response_id=response_id, max_output_tokens=4).output_text


def test_what_is_not_stored_lives_on_its_connection_only(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        first = turn(connection, "Hello.", store=False, max_output_tokens=4)
        assert turn(connection, "Again.", store=False, previous_response_id=first.id, max_output_tokens=4)
        with client.responses.connect() as other:
            send(other, input="Again.", store=False, previous_response_id=first.id)
            last = finish(other)[-1]
            assert (last.type, last.error.code) == ("error", "previous_response_not_found")


def test_an_answer_goes_on_when_its_page_is_reloaded(client: OpenAI, server: ServerProcess) -> None:
    with client.responses.connect() as connection:
        send(connection, input="Count to one hundred.", ignore_eos=True, max_output_tokens=60)
        seen = []
        while not seen or seen[-1].type != "response.output_text.delta":
            seen.append(receive(connection))
    response_id = seen[0].response.id
    with client.responses.connect() as connection:
        connection.send(
            {  # type: ignore[arg-type]
                "type": "response.attach",
                "response_id": response_id,
                "starting_after": seen[-1].sequence_number,
            }
        )
        rest = finish(connection)
    assert (
        rest[0].sequence_number == seen[-1].sequence_number + 1
        or rest[0].type == "response.output_text.delta"
    )
    text = "".join(event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta")
    assert text == rest[-1].response.output_text
    assert rest[-1].response.usage.output_tokens == 60


def test_a_conversation_keeps_what_was_said(client: OpenAI) -> None:
    conversation = client.conversations.create(metadata={"title": "Colours"})
    with client.responses.connect() as connection:
        turn(connection, "Say one colour.", conversation=conversation.id, max_output_tokens=8)
        turn(connection, "Another one.", conversation={"id": conversation.id}, max_output_tokens=8)
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user", "assistant"]
    assert client.conversations.retrieve(conversation.id).metadata == {"title": "Colours"}
    client.conversations.update(conversation.id, metadata={"title": "Hues"})
    listed = client.get("/conversations", cast_to=object)
    assert listed["data"][0]["metadata"] == {"title": "Hues"}  # type: ignore[index]
    client.conversations.delete(conversation.id)
    with pytest.raises(Exception, match="not found"):
        client.conversations.retrieve(conversation.id)


def test_an_engine_that_dies_fails_its_turn_and_comes_back(client: OpenAI, server: ServerProcess) -> None:
    with client.responses.connect() as connection:
        kept = turn(connection, "My name is Grace. Say OK.", max_output_tokens=8)
        send(
            connection,
            input="Write a very long story.",
            ignore_eos=True,
            max_output_tokens=3000,
            previous_response_id=kept.id,
        )
        while receive(connection).type != "response.output_text.delta":
            pass
        os.kill(server.engine_pid(), signal.SIGKILL)
        failed = finish(connection)[-1]
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error.code == "server_error"
        assert "Traceback" not in failed.response.error.message
        server.wait_until_ready()
        again = turn(connection, "What is my name?", previous_response_id=kept.id, max_output_tokens=20)
        assert cached(again) == 0
        assert "Grace" in again.output_text
    metrics = server.wait_until_idle()
    assert metrics["kv_blocks.pinned"] == 0


def test_a_restart_finishes_what_runs_and_loses_nothing(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    address = server.url.replace("http", "ws") + "/v1/responses"
    create = {
        "type": "response.create",
        "input": "Remember the word cobalt.",
        "ignore_eos": True,
        "temperature": 0,
    }
    with connect(address) as connection:
        connection.send(json.dumps({**create, "max_output_tokens": 60}))
        event = {"type": ""}
        while event["type"] != "response.output_text.delta":
            event = json.loads(connection.recv(timeout=60))
        server.interrupt()
        while event["type"] != "response.incomplete":
            event = json.loads(connection.recv(timeout=60))
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=60)
        assert connection.close_code == 1012
    response = event["response"]  # type: ignore[typeddict-item]
    assert response["usage"]["output_tokens"] == 60
    assert server.wait() == 0

    server = start_server()
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert (
            client.responses.retrieve(response["id"]).output_text
            == response["output"][0]["content"][0]["text"]
        )
        with client.responses.connect() as connection:
            again = turn(connection, "Go on.", previous_response_id=response["id"], max_output_tokens=4)
        assert again.usage is not None
        assert again.usage.input_tokens > response["usage"]["total_tokens"]
    assert server.stop() == 0
