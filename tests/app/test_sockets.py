"""The connection over real sockets and the real server: what a test client cannot show."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.app.support import LiveServer, ScriptedSessions, ScriptedTurn, live_server, until_cancelled

ENDINGS = {"response.completed", "response.incomplete", "response.failed", "error"}
PIECE = "x" * 1000


def url(server: LiveServer) -> str:
    return f"ws://{server.address}/v1/responses"


def create(text: str = "hi", **fields: Any) -> str:
    return json.dumps({"type": "response.create", "input": text, **fields})


def until_end(connection: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDINGS:
        events.append(json.loads(connection.recv(timeout=20)))
    return events


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.005)


async def flood(turn: ScriptedTurn) -> None:
    """Far more than any kernel buffer holds, in small pieces."""
    for _ in range(20_000):
        turn.say(PIECE)
        if turn.cancelled.is_set():
            break
        await asyncio.sleep(0)
    turn.end()


async def flood_or_hello(turn: ScriptedTurn) -> None:
    if turn.spec.input[0]["content"][0]["text"] == "flood":
        await flood(turn)
    else:
        turn.say("hello")
        turn.end()


@contextlib.contextmanager
def raw_socket(server: LiveServer) -> Any:
    """An upgraded connection whose reading is entirely ours."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(
            f"GET /v1/responses HTTP/1.1\r\nHost: {server.address}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += raw.recv(1)
        assert b" 101 " in answer
        yield raw


def frame(payload: bytes, opcode: int = 1) -> bytes:
    mask = os.urandom(4)
    length = (
        struct.pack("!B", 0x80 | len(payload))
        if len(payload) < 126
        else struct.pack("!BH", 0x80 | 126, len(payload))
    )
    return (
        bytes([0x80 | opcode])
        + length
        + mask
        + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
    )


def close_code(data: bytes) -> int | None:
    """The code of the close frame at the end of what a server sent."""
    position, code = 0, None
    while position + 2 <= len(data):
        opcode, length = data[position] & 15, data[position + 1]
        position += 2
        if length == 126:
            (length,) = struct.unpack_from("!H", data, position)
            position += 2
        elif length == 127:
            (length,) = struct.unpack_from("!Q", data, position)
            position += 8
        if opcode == 8:
            (code,) = struct.unpack_from("!H", data, position)
        position += length
    return code


def read_to_end(raw: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := raw.recv(1 << 20):
            data += chunk
    return data


def test_a_client_that_stops_reading_is_closed_and_delays_nobody() -> None:
    sessions = ScriptedSessions(flood_or_hello)
    with live_server(sessions, send_deadline=0.5, outbox_bytes=65536) as server, raw_socket(server) as slow:
        slow.sendall(frame(create("flood", store=False).encode()))
        wait_until(lambda: bool(sessions.turns), "the turn")
        with connect(url(server)) as other:
            other.send(create())
            assert until_end(other)[-1]["type"] == "response.completed"
            wait_until(lambda: len(server.services.connections) == 1, "the slow one's end")
            other.send(create())
            assert until_end(other)[-1]["type"] == "response.completed"
        assert close_code(read_to_end(slow)) == 4008
        flooding = next(turn for turn in sessions.turns.values() if not turn.spec.store)
        assert flooding.cancelled.is_set()
        assert server.services.metrics.slow_closes._value.get() == 1


def test_a_client_that_reads_slowly_gets_everything_in_larger_frames() -> None:
    async def say(turn: ScriptedTurn) -> None:
        for number in range(3000):
            turn.say(f"{number:06d}" + PIECE)
            await asyncio.sleep(0)
        turn.end()

    with (
        live_server(ScriptedSessions(say), outbox_bytes=16384) as server,
        connect(url(server), max_size=None, max_queue=1) as slow,
    ):
        slow.send(create())
        time.sleep(0.5)
        assert max(connection.outbox.size for connection in server.services.connections) < 10 * 16384
        events = until_end(slow)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "".join(f"{number:06d}" + PIECE for number in range(3000))
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 3000


def test_a_client_that_writes_and_never_reads_has_an_end() -> None:
    with live_server(ScriptedSessions(), outbox_bytes=4096, send_deadline=5.0) as server:
        with raw_socket(server) as raw, contextlib.suppress(ConnectionError, TimeoutError):
            ping = frame(b'{"type": "ping"}') * 1000
            for _ in range(200):
                raw.sendall(ping)
        wait_until(lambda: not server.services.connections, "the end of the connection")
        with connect(url(server)) as other:
            other.send(create())
            assert until_end(other)[-1]["type"] == "response.completed"


def test_a_refused_upgrade_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with live_server(ScriptedSessions()) as server:
        with pytest.raises(InvalidStatus) as refused:
            connect(url(server), additional_headers={"Origin": "http://elsewhere.example"})
        assert refused.value.response.status_code == 403
        with connect(url(server)) as connection:
            connection.send(create())
            assert until_end(connection)[-1]["type"] == "response.completed"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_ten_megabyte_frame_is_taken_and_a_larger_one_closes_the_socket() -> None:
    with live_server(ScriptedSessions()) as server:
        with connect(url(server)) as connection:
            connection.send(create("x" * 10_000_000))
            assert until_end(connection)[-1]["type"] == "response.completed"
            # The server closes as soon as it has read the frame's length.
            with contextlib.suppress(ConnectionClosed):
                connection.send(create("x" * 17_000_000))
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=20)
            assert connection.close_code == 1009
        with connect(url(server)) as connection:
            connection.send(create())
            assert until_end(connection)[-1]["type"] == "response.completed"


def test_binary_junk_leaves_the_socket_open() -> None:
    with live_server(ScriptedSessions()) as server, connect(url(server)) as connection:
        for junk in (b"", b"\x00" * 100, os.urandom(1000)):
            connection.send(junk)
            assert json.loads(connection.recv(timeout=10))["error"]["code"] == "unsupported_message_type"
        connection.send(create())
        assert until_end(connection)[-1]["type"] == "response.completed"


def test_a_broken_frame_ends_only_its_own_connection() -> None:
    with live_server(ScriptedSessions()) as server:
        for broken in (b"\xff" * 50, b"\x81\x05hello", frame(b"\xff\xfe", 1), b"\x83\x80aaaa"):
            with raw_socket(server) as raw:
                raw.sendall(broken)
                assert close_code(read_to_end(raw)) in (1002, 1007)
        wait_until(lambda: not server.services.connections, "all connections' end")
        with connect(url(server)) as connection:
            connection.send(create())
            assert until_end(connection)[-1]["type"] == "response.completed"


@pytest.mark.parametrize("politely", [True, False])
def test_a_client_that_vanishes_before_the_first_token_cancels_what_is_not_stored(politely: bool) -> None:
    async def silent(turn: ScriptedTurn) -> None:
        await turn.cancelled.wait()
        turn.end("cancelled")

    sessions = ScriptedSessions(silent)
    with live_server(sessions) as server:
        with raw_socket(server) as raw:
            raw.sendall(frame(create(store=False).encode()))
            wait_until(lambda: bool(sessions.turns), "the turn")
            if not politely:
                # A reset instead of an end.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        (turn,) = sessions.turns.values()
        wait_until(turn.cancelled.is_set, "the cancel")
        wait_until(lambda: sessions.closed_scopes == [turn.spec.scope], "the end of its scope")
        wait_until(lambda: not server.services.connections, "the end of the connection")


def test_a_stored_turn_outlives_its_connection_and_is_found_again() -> None:
    release = asyncio.Event()

    async def patient(turn: ScriptedTurn) -> None:
        turn.say("one ")
        await release.wait()
        turn.say("two")
        turn.end()

    with live_server(ScriptedSessions(patient)) as server:
        with connect(url(server)) as first:
            first.send(create())
            created = json.loads(first.recv(timeout=10))
            seen = created["sequence_number"]
        wait_until(lambda: not server.services.connections, "the end of the first connection")
        with connect(url(server)) as second:
            response_id = created["response"]["id"]
            second.send(
                json.dumps({"type": "response.attach", "response_id": response_id, "starting_after": seen})
            )

            async def let_go() -> None:
                release.set()

            server.call(let_go())
            events = until_end(second)
    assert events[-1]["type"] == "response.completed"
    assert events[0]["sequence_number"] > seen
    assert "".join(event.get("delta", "") for event in events) == "one two"


def test_pings_are_answered_while_a_turn_runs() -> None:
    with live_server(ScriptedSessions(until_cancelled)) as server, connect(url(server)) as connection:
        connection.send(create())
        while json.loads(connection.recv(timeout=10))["type"] != "response.output_text.delta":
            pass
        assert connection.ping().wait(10)
        connection.send('{"type": "ping"}')
        assert json.loads(connection.recv(timeout=10)) == {"type": "pong"}
        connection.send('{"type": "response.cancel"}')
        assert until_end(connection)[-1]["response"]["status"] == "cancelled"
