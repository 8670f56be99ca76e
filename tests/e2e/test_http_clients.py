"""Clients that resend their history, over HTTP, with the unmodified SDK."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.lib.responses_websocket import ResponsesWebSocketLimits, ResponsesWebSocketSession

from tests.e2e.server import ROOT, ServerProcess
from tests.e2e.talk import MODEL

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_completion(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_completion_says_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=20
    )
    text, usage = "", None
    with client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_resent_history_finds_its_kv_again(client: OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief and kind. " * 10}, *QUESTION]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=30)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Spain?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.total_tokens - 1


def test_refusals_are_the_sdks_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, n=2)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 5000}])
    assert long.value.code == "context_length_exceeded"


def test_responses_over_http(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=8)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    with client.responses.stream(
        model=MODEL, input="Again.", previous_response_id=made.id, temperature=0, max_output_tokens=8
    ) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert text == last.response.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_sdks_lanes(client: OpenAI) -> None:
    limits = ResponsesWebSocketLimits(
        max_lanes=8, max_events_per_lane=4096, max_events=8192, max_bytes_per_lane=1 << 24, max_bytes=1 << 25
    )
    with (
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=limits) as session,
    ):
        lanes = [session.lane(name) for name in ("x", "y", "z")]
        for lane in lanes:
            lane.send(
                {
                    "type": "response.create",
                    "model": MODEL,
                    "store": False,
                    "input": "hi",
                    "temperature": 0,
                    "max_output_tokens": 8,
                }
            )
        answers = {lane.get_final_response(timeout=120).output_text for lane in lanes}
    assert len(answers) == 1


def test_a_chat_in_the_terminal(server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "chat", server.url, "--system", "Answer in one short sentence."],
        input="What is the capital of France?\n/new\n/quit\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "A new conversation." in done.stdout
    assert "new tokens read" in done.stdout


def test_nothing_that_was_said_is_in_the_log(client: OpenAI, server: ServerProcess) -> None:
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "xyzzy-secret"}], max_tokens=4, user="plugh-secret"
    )
    wrong: Any = [{"role": "xyzzy-secret", "content": ""}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=wrong)
    assert not any("-secret" in str(line) for line in server.lines())
