"""Bad input gets its documented answer, the socket or the server lives on, and no block is lost."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

import pytest
from openai import OpenAI
from openai.resources.responses.responses import ResponsesConnection
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2e.server import ServerProcess
from tests.e2e.talk import refusal, send, turn


@pytest.fixture(autouse=True)
def every_block_is_accounted_for(server: ServerProcess) -> Any:
    yield
    metrics = server.wait_until_idle()
    assert metrics["kv_blocks.pinned"] == 0
    counted = metrics["kv_blocks.free"] + metrics["kv_blocks.idle"]
    # Block 0 may be set aside for padding.
    assert metrics["kv_blocks.total"] - counted in (0, 1)


def send_text(connection: ResponsesConnection, text: str) -> None:
    connection._connection.send(text)


FRAMES = [
    ("{", 400, "invalid_json"),
    ("nonsense", 400, "invalid_json"),
    ("[1]", 400, "invalid_request"),
    ('{"type": "no.such.event"}', 400, "unknown_event_type"),
    ('{"type": "response.create", "input": {"a": 1}}', 400, "invalid_request"),
    ('{"type": "response.create", "input": "x", "temperature": "hot"}', 400, "invalid_request"),
    ('{"type": "response.create", "input": "x", "max_output_tokens": 0}', 400, "invalid_request"),
    ('{"type": "response.create", "input": "x", "max_output_tokens": -1}', 400, "invalid_request"),
    (
        '{"type": "response.create", "input": "x", "previous_response_id": "resp_0"}',
        400,
        "previous_response_not_found",
    ),
    ('{"type": "response.create", "input": "x", "conversation": "conv_0"}', 404, "conversation_not_found"),
    ('{"type": "response.create", "input": "x", "model": "gpt"}', 404, "model_not_found"),
    (
        '{"type": "response.create", "input": "x", "tools": [{"type": "function"}]}',
        400,
        "unsupported_parameter",
    ),
    ('{"type": "response.attach", "response_id": "resp_0"}', 404, "response_not_found"),
    ('{"type": "response.cancel", "response_id": "resp_0"}', 404, "response_not_found"),
]


def test_bad_frames_are_refused_one_by_one(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        for frame, status, code in FRAMES:
            send_text(connection, frame)
            assert refusal(connection) == (status, code), frame
        assert turn(connection, "Hello.", max_output_tokens=2).output_text


def test_a_prompt_longer_than_the_context_is_refused(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        send(connection, input="word " * 5000)
        assert refusal(connection) == (400, "context_length_exceeded")
        # Ten megabytes in one frame are taken, and are too long as well.
        send(connection, input="words and more words " * 500_000)
        assert refusal(connection) == (400, "context_length_exceeded")
        assert turn(connection, "Hello.", max_output_tokens=2).output_text


def test_a_frame_beyond_the_limit_closes_its_socket_only(client: OpenAI, server: ServerProcess) -> None:
    with connect(server.url.replace("http", "ws") + "/v1/responses") as connection:
        # The server closes as soon as it has read the frame's length.
        with contextlib.suppress(ConnectionClosed):
            connection.send("x" * 17_000_000)
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)
        assert connection.close_code == 1009
    with client.responses.connect() as other:
        assert turn(other, "Hello.", max_output_tokens=2).output_text


def test_binary_junk_is_refused(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        connection._connection.send(os.urandom(1000))
        assert refusal(connection) == (400, "unsupported_message_type")
        assert turn(connection, "Hello.", max_output_tokens=2).output_text


def test_a_client_that_vanishes_mid_prefill_leaves_nothing_behind(
    client: OpenAI, server: ServerProcess
) -> None:
    long = " ".join(f"word{number}" for number in range(700))
    for _ in range(3):
        connection = client.responses.connect().enter()
        send(connection, input=long, store=False, max_output_tokens=500, ignore_eos=True)
        while json.loads(connection.recv_bytes())["type"] != "response.in_progress":
            pass
        raw: socket.socket = connection._connection.socket
        raw.shutdown(socket.SHUT_RDWR)
    with client.responses.connect() as other:
        assert turn(other, "Hello.", max_output_tokens=2).output_text
    before = server.wait_until_idle()["generation_tokens_total"]
    with client.responses.connect() as other:
        turn(other, "Hello.", max_output_tokens=2)
    assert server.wait_until_idle()["generation_tokens_total"] - before <= 2


def test_a_client_that_stops_reading_is_closed_and_delays_nobody(
    client: OpenAI, server: ServerProcess
) -> None:
    with client.responses.connect() as connection:
        large = turn(connection, "Hello.", instructions="Be kind. " * 900, max_output_tokens=2)
    closed = server.metrics()["ws_slow_closes_total"]
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        stuck.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b" 101 " in stuck.recv(100)
        # Each of these is answered with several copies of the long instructions.
        attach = json.dumps({"type": "response.attach", "response_id": large.id}).encode()
        stuck.sendall((bytes([0x81, 0x80 | len(attach)]) + bytes(4) + attach) * 60)
        with client.responses.connect() as other:
            assert turn(other, "Hello.", max_output_tokens=8).output_text
        deadline = time.monotonic() + 60
        while server.metrics()["ws_slow_closes_total"] == closed:
            assert time.monotonic() < deadline, "the slow client was never closed"
            time.sleep(0.1)
