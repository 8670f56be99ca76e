"""The connection over Starlette's test client: frames in, frames out, and what is left afterwards."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from app.config import Settings
from app.main import create_app
from app.wire import MSGPACK_SUBPROTOCOL
from tests.app.support import ScriptedSessions, ScriptedTurn, backend, until_cancelled

URL = "ws://127.0.0.1/v1/responses"
ENDINGS = {"response.completed", "response.incomplete", "response.failed", "error"}


class Harness:
    def __init__(self, sessions: ScriptedSessions, **settings: Any) -> None:
        self.sessions = sessions
        self.app = create_app(Settings(**settings), backend(sessions))
        self.client = TestClient(self.app, base_url="http://127.0.0.1")

    def __enter__(self) -> "Harness":
        self.client.__enter__()
        # Loading is a task of its own; the first request waits for it.
        self.call(self.app.state.services.backend.loaded.wait)
        return self

    def __exit__(self, *args: Any) -> None:
        self.client.__exit__(*args)

    def call(self, function: Any, *args: Any) -> Any:
        """Run something on the application's event loop."""
        assert self.client.portal is not None
        return self.client.portal.call(function, *args)

    def wait_for_leavers(self) -> None:
        """Return when every connection that was left has been cleared away."""
        self.call(self.app.state.services.background.wait)

    def connect(self, **options: Any) -> WebSocketTestSession:
        return self.client.websocket_connect(URL, **options)


@pytest.fixture
def harness() -> Iterator[Harness]:
    with Harness(ScriptedSessions()) as made:
        yield made


def create(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"type": "response.create", "input": text, **fields}


def until_end(socket: WebSocketTestSession) -> list[dict[str, Any]]:
    events = []
    while not events or events[-1]["type"] not in ENDINGS:
        events.append(socket.receive_json())
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def test_a_turn_streams_its_events_in_order(harness: Harness) -> None:
    with harness.connect() as socket:
        socket.send_json(create())
        events = until_end(socket)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert text_of(events) == "Hello world"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    assert not any("stream_id" in event for event in events)


def test_a_turn_is_asked_for_by_its_owner_over_its_connection(harness: Harness) -> None:
    with harness.connect() as socket:
        socket.send_json(create(store=False))
        until_end(socket)
    with harness.connect() as socket:
        socket.send_json(create())
        until_end(socket)
    harness.wait_for_leavers()
    first, second = harness.sessions.specs
    assert first.owner == second.owner == "local"
    assert first.scope != second.scope
    assert harness.sessions.closed_scopes == [first.scope, second.scope]


def test_events_carry_the_lane_of_their_turn(harness: Harness) -> None:
    with harness.connect() as socket:
        socket.send_json(create(stream_id="a"))
        assert {event["stream_id"] for event in until_end(socket)} == {"a"}


def test_refusals_keep_the_socket_open(harness: Harness) -> None:
    frames: list[tuple[Any, str]] = [
        ("{", "invalid_json"),
        ("[]", "invalid_request"),
        ('{"type": "nonsense"}', "unknown_event_type"),
        ('{"type": "response.create"}', "missing_parameter"),
        ('{"type": "response.create", "input": "x", "max_output_tokens": 0}', "invalid_request"),
        ('{"type": "response.create", "input": "x", "top_p": 7}', "invalid_request"),
        (
            '{"type": "response.create", "input": "x", "previous_response_id": "resp_no"}',
            "previous_response_not_found",
        ),
        ('{"type": "response.create", "input": "x", "stream_id": "no spaces"}', "invalid_stream_id"),
        ('{"type": "response.cancel", "response_id": "resp_no"}', "response_not_found"),
        ('{"type": "response.cancel"}', "response_not_active"),
        ('{"type": "response.attach", "response_id": "resp_no"}', "response_not_found"),
        (b"\x00\x01\x02", "unsupported_message_type"),
    ]
    with harness.connect() as socket:
        for frame, code in frames:
            if isinstance(frame, bytes):
                socket.send_bytes(frame)
            else:
                socket.send_text(frame)
            answer = socket.receive_json()
            assert (answer["type"], answer["error"]["code"]) == ("error", code), frame
            assert set(answer) == {"type", "status", "error"}
            assert set(answer["error"]) == {"type", "code", "message", "param"}
            assert 400 <= answer["status"] < 500
        socket.send_json(create())
        assert until_end(socket)[-1]["type"] == "response.completed"


def test_a_refusal_belongs_to_its_lane(harness: Harness) -> None:
    with harness.connect() as socket:
        socket.send_json(create(stream_id="a", temperature="hot"))
        assert socket.receive_json()["stream_id"] == "a"


def test_internals_never_reach_a_client() -> None:
    async def break_down(turn: ScriptedTurn) -> None: ...

    class Broken(ScriptedSessions):
        async def begin(self, spec: Any) -> Any:
            raise KeyError("secret internal detail")

    with Harness(Broken(break_down)) as harness, harness.connect() as socket:
        socket.send_json(create())
        answer = socket.receive_json()
        assert (answer["status"], answer["error"]["code"]) == (500, "internal_error")
        assert "secret" not in str(answer)
        socket.send_json({"type": "ping"})
        assert socket.receive_json() == {"type": "pong"}


def test_a_fault_in_reading_a_frame_costs_that_frame_only(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(data: Any) -> Any:
        raise KeyError("secret internal detail")

    with harness.connect() as socket:
        with monkeypatch.context() as patch:
            patch.setattr("app.connection.parse_event", broken)
            socket.send_json({"type": "ping"})
            answer = socket.receive_json()
        assert (answer["status"], answer["error"]["code"]) == (500, "internal_error")
        assert "secret" not in str(answer)
        socket.send_json({"type": "ping"})
        assert socket.receive_json() == {"type": "pong"}


def test_msgpack_clients_get_the_same_events(harness: Harness) -> None:
    with harness.connect(subprotocols=["other", MSGPACK_SUBPROTOCOL]) as socket:
        assert socket.accepted_subprotocol == MSGPACK_SUBPROTOCOL
        socket.send_bytes(b"\xc1")
        assert msgpack.unpackb(socket.receive_bytes())["error"]["code"] == "invalid_msgpack"
        socket.send_bytes(msgpack.packb(create()))
        events = [msgpack.unpackb(socket.receive_bytes())]
        while events[-1]["type"] not in ENDINGS:
            events.append(msgpack.unpackb(socket.receive_bytes()))
        assert text_of(events) == "Hello world"


def test_unknown_subprotocols_are_not_chosen(harness: Harness) -> None:
    with harness.connect(subprotocols=["other"]) as socket:
        assert socket.accepted_subprotocol is None


def test_a_lane_is_first_in_first_out() -> None:
    async def echo(turn: ScriptedTurn) -> None:
        turn.say(turn.spec.input[0]["content"][0]["text"])
        await asyncio.sleep(0.01)
        turn.end()

    with Harness(ScriptedSessions(echo)) as harness, harness.connect() as socket:
        for number in range(3):
            socket.send_json(create(str(number)))
        runs = [until_end(socket) for _ in range(3)]
        assert [text_of(events) for events in runs] == ["0", "1", "2"]
        for events in runs:
            # Nothing of the next turn before the end of the one before it.
            assert [event["type"] for event in events].count("response.created") == 1


def test_lanes_run_beside_each_other_and_a_refusal_waits_for_its_turn() -> None:
    async def play(turn: ScriptedTurn) -> None:
        if turn.spec.input[0]["content"][0]["text"] == "long":
            await turn.cancelled.wait()
            turn.end("cancelled")
        else:
            turn.say("quick")
            turn.end()

    with Harness(ScriptedSessions(play)) as harness, harness.connect() as socket:
        socket.send_json(create("long", stream_id="a"))
        socket.send_json(create(temperature="hot", stream_id="a"))
        socket.send_json(create("short", stream_id="b"))
        seen: list[dict[str, Any]] = []
        while not seen or seen[-1]["type"] != "response.completed":
            seen.append(socket.receive_json())
        assert seen[-1]["stream_id"] == "b"
        assert not any(event["type"] == "error" for event in seen)
        socket.send_json({"type": "response.cancel", "stream_id": "b"})
        assert socket.receive_json()["error"]["code"] == "response_not_active"
        response_id = next(event["response"]["id"] for event in seen if event.get("stream_id") == "a")
        socket.send_json({"type": "response.cancel", "response_id": response_id})
        ended = until_end(socket)[-1]
        assert (ended["type"], ended["response"]["status"]) == ("response.incomplete", "cancelled")
        assert socket.receive_json()["error"]["code"] == "invalid_request"


def test_a_cancel_ends_the_lane_and_what_waits_on_it() -> None:
    with Harness(ScriptedSessions(until_cancelled)) as harness, harness.connect() as socket:
        for _ in range(3):
            socket.send_json(create(stream_id="a"))
        socket.send_json({"type": "response.cancel", "stream_id": "a"})
        endings = list(_ends(socket, 3))
        assert sorted(event["type"] for event in endings) == ["error", "error", "response.incomplete"]
        assert all(event["stream_id"] == "a" for event in endings)
        assert {event["error"]["code"] for event in endings if event["type"] == "error"} == {
            "response_cancelled"
        }
        assert len(harness.sessions.specs) == 1


def _ends(socket: WebSocketTestSession, count: int) -> Iterator[dict[str, Any]]:
    while count:
        event = socket.receive_json()
        if event["type"] in ENDINGS:
            count -= 1
            yield event


def test_a_connection_has_thirty_two_names_and_no_more(harness: Harness) -> None:
    with harness.connect() as socket:
        for number in range(32):
            socket.send_json(create(stream_id=f"lane-{number}"))
            assert until_end(socket)[-1]["type"] == "response.completed"
        socket.send_json(create(stream_id="one-more"))
        answer = socket.receive_json()
        assert (answer["error"]["code"], answer["stream_id"]) == (
            "websocket_stream_limit_reached",
            "one-more",
        )
        for lane in ({}, {"stream_id": "lane-3"}):
            socket.send_json(create(**lane))
            assert until_end(socket)[-1]["type"] == "response.completed"


def test_sixteen_turns_run_at_once_and_more_wait() -> None:
    with Harness(ScriptedSessions(until_cancelled)) as harness, harness.connect() as socket:
        for number in range(20):
            socket.send_json(create(stream_id=f"lane-{number}"))
        started = [socket.receive_json() for _ in range(16 * 5)]
        assert len({event["stream_id"] for event in started}) == 16
        socket.send_json({"type": "ping"})
        assert socket.receive_json() == {"type": "pong"}
        assert len(harness.sessions.specs) == 16
        socket.send_json({"type": "response.cancel", "stream_id": "lane-0"})
        events = []
        while not events or events[-1]["type"] != "response.created":
            events.append(socket.receive_json())
        assert events[-1]["stream_id"] == "lane-16"


def test_a_full_queue_is_refused() -> None:
    with Harness(ScriptedSessions(until_cancelled), queue_depth=2) as harness, harness.connect() as socket:
        socket.send_json(create())
        while socket.receive_json()["type"] != "response.output_text.delta":
            pass
        for _ in range(3):
            socket.send_json(create())
        answer = socket.receive_json()
        assert (answer["status"], answer["error"]["code"]) == (429, "websocket_queue_full")


def test_attaching_replays_from_where_it_is_told(harness: Harness) -> None:
    with harness.connect() as socket:
        socket.send_json(create())
        events = until_end(socket)
    response_id = events[0]["response"]["id"]
    middle = events[4]["sequence_number"]
    with harness.connect() as socket:
        socket.send_json({"type": "response.attach", "response_id": response_id, "stream_id": "v"})
        replay = until_end(socket)
        assert text_of(replay) == "Hello world"
        assert all(event["stream_id"] == "v" for event in replay)
        socket.send_json({"type": "response.attach", "response_id": response_id, "starting_after": middle})
        rest = until_end(socket)
        assert min(event["sequence_number"] for event in rest) > middle
        assert text_of(events[:5]) + text_of(rest) == "Hello world"


def test_what_another_owner_stored_is_not_there() -> None:
    keys = ("one", "two")
    with Harness(ScriptedSessions(), api_key=keys) as harness:
        with harness.connect(headers={"authorization": "Bearer one"}) as socket:
            socket.send_json(create())
            response_id = until_end(socket)[0]["response"]["id"]
        with harness.connect(headers={"authorization": "Bearer two"}) as socket:
            for event in (
                {"type": "response.attach", "response_id": response_id},
                {"type": "response.cancel", "response_id": response_id},
            ):
                socket.send_json(event)
                assert socket.receive_json()["error"]["code"] == "response_not_found"


@pytest.mark.parametrize(("store", "cancelled"), [(False, True), (True, False)])
def test_leaving_cancels_only_what_is_not_stored(store: bool, cancelled: bool) -> None:
    with Harness(ScriptedSessions(until_cancelled)) as harness:
        with harness.connect() as socket:
            socket.send_json(create(store=store))
            while socket.receive_json()["type"] != "response.output_text.delta":
                pass
        harness.wait_for_leavers()
        (turn,) = harness.sessions.turns.values()
        assert harness.sessions.closed_scopes == [turn.spec.scope]
        assert turn.cancelled.is_set() is cancelled
        harness.call(turn.cancel)


def test_quiet_events_get_no_answer(harness: Harness) -> None:
    with harness.connect() as socket:
        socket.send_json({"type": "response.processed", "response_id": "r"})
        socket.send_json({"type": "conversation.open", "conversation_id": "c"})
        socket.send_json({"type": "ping"})
        assert socket.receive_json() == {"type": "pong"}


def test_too_many_sockets_are_refused_before_they_open() -> None:
    with Harness(ScriptedSessions(), max_sockets=1) as harness, harness.connect():
        with pytest.raises(WebSocketDenialResponse) as caught, harness.connect():
            pass
        assert caught.value.status_code == 429
        assert caught.value.json()["error"]["code"] == "too_many_connections"
        assert "retry-after" in caught.value.headers


def test_draining_finishes_what_runs_and_closes() -> None:
    with Harness(ScriptedSessions(until_cancelled)) as harness, harness.connect() as busy:
        with harness.connect() as idle:
            busy.send_json(create())
            while busy.receive_json()["type"] != "response.output_text.delta":
                pass
            portal = harness.client.portal
            assert portal is not None
            services = harness.app.state.services
            draining = portal.start_task_soon(services.drain, 30.0)
            with pytest.raises(WebSocketDisconnect) as caught:
                idle.receive_json()
            assert caught.value.code == 1012
        assert harness.client.get("/readyz").json() == {"status": "draining"}
        busy.send_json(create())
        assert busy.receive_json()["error"]["code"] == "server_draining"
        with pytest.raises(WebSocketDenialResponse) as denied, harness.connect():
            pass
        assert denied.value.status_code == 503
        (turn,) = harness.sessions.turns.values()
        portal.call(turn.cancel)
        assert until_end(busy)[-1]["type"] == "response.incomplete"
        with pytest.raises(WebSocketDisconnect) as closed:
            busy.receive_json()
        assert closed.value.code == 1012
        assert draining.result(10) is True


def test_a_drain_does_not_wait_for_ever() -> None:
    with Harness(ScriptedSessions(until_cancelled)) as harness, harness.connect() as socket:
        socket.send_json(create())
        assert socket.receive_json()["type"] == "response.created"
        assert harness.call(harness.app.state.services.drain, 0.01) is False
