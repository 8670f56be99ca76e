"""The HTTP side over Starlette's test client."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient, WebSocketDenialResponse

from app.backend import Backend, OnStage, Parts
from app.config import Settings
from app.main import create_app
from engine.api import EngineStats
from tests.app.support import (
    MODEL,
    ScriptedEngine,
    ScriptedSessions,
    ScriptedTurn,
    backend,
    until_cancelled,
)


def client_of(
    sessions: Any, *, engine: Any = None, behind: Backend | None = None, **settings: Any
) -> TestClient:
    app = create_app(Settings(**settings), behind or backend(sessions, engine))
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def loaded(client: TestClient) -> TestClient:
    assert client.portal is not None
    client.portal.call(client.app.state.services.backend.loaded.wait)  # type: ignore[attr-defined]
    return client


@pytest.fixture
def sessions() -> ScriptedSessions:
    return ScriptedSessions()


@pytest.fixture
def client(sessions: ScriptedSessions) -> Iterator[TestClient]:
    with client_of(sessions) as made:
        yield loaded(made)


def sse(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_completion_is_answered_whole(client: TestClient, sessions: ScriptedSessions) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert sessions.closed_scopes == [sessions.specs[0].scope]


def test_a_chat_completion_streams(client: TestClient) -> None:
    answer = client.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = sse(answer.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 12
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1


def test_without_include_usage_no_chunk_speaks_of_usage(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    *chunks, _ = sse(answer.text)
    assert not any("usage" in chunk for chunk in chunks)


def test_reaching_the_limit_is_a_finish_reason() -> None:
    async def cut(turn: ScriptedTurn) -> None:
        turn.say("Hel")
        turn.end("incomplete", incomplete_reason="max_output_tokens")

    with client_of(ScriptedSessions(cut)) as client:
        answer = loaded(client).post("/v1/chat/completions", json=CHAT).json()
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_failed_answer_is_an_error_both_ways() -> None:
    async def fail(turn: ScriptedTurn) -> None:
        turn.say("Hel")
        turn.end("failed", error={"code": "server_error", "message": "The engine stopped."})

    with client_of(ScriptedSessions(fail)) as client:
        whole = loaded(client).post("/v1/chat/completions", json=CHAT)
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "The engine stopped.")
        *_, error, done = sse(client.post("/v1/chat/completions", json={**CHAT, "stream": True}).text)
        assert (error["error"]["code"], done) == ("server_error", "[DONE]")


def test_a_chat_error_names_the_field_as_the_client_calls_it(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 0})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_request"),
        (b"", 400, "missing_parameter"),
        (b"\xff", 400, "invalid_json"),
        (b'{"input": "x", "model": "other"}', 404, "model_not_found"),
        (b'{"input": "' + b"x" * 3000 + b'"}', 413, "request_too_large"),
        (b'{"input": "x", "previous_response_id": "resp_no"}', 400, "previous_response_not_found"),
    ],
)
def test_a_bad_body_is_refused(body: bytes, status: int, code: str) -> None:
    with client_of(ScriptedSessions(), max_frame_bytes=2048) as client:
        answer = loaded(client).post("/v1/responses", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_response_over_http(client: TestClient, sessions: ScriptedSessions) -> None:
    made = client.post("/v1/responses", json={"input": "hi", "model": MODEL}).json()
    assert (made["status"], made["output"][0]["content"][0]["text"]) == ("completed", "Hello world")
    assert client.get(f"/v1/responses/{made['id']}").json() == made
    assert client.post(f"/v1/responses/{made['id']}/cancel").json() == made
    deleted = client.delete(f"/v1/responses/{made['id']}").json()
    assert deleted == {"id": made["id"], "object": "response", "deleted": True}
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_a_response_streams_and_can_be_replayed_from_anywhere(client: TestClient) -> None:
    answer = client.post("/v1/responses", json={"input": "hi", "stream": True})
    *events, done = sse(answer.text)
    assert done == "[DONE]"
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    response_id = events[0]["response"]["id"]
    middle = events[3]["sequence_number"]
    replay = client.get(f"/v1/responses/{response_id}?stream=true&starting_after={middle}")
    assert [event["type"] for event in sse(replay.text)[:-1]][-1] == "response.completed"
    assert all(event["sequence_number"] > middle for event in sse(replay.text)[:-1])
    assert client.get(f"/v1/responses/{response_id}?stream=true&starting_after=x").status_code == 400


@pytest.mark.parametrize(("store", "cancelled"), [(False, True), (True, False)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_cancels_only_what_is_not_stored(
    store: bool, cancelled: bool, stream: bool
) -> None:
    """Also while nothing is being sent: the scripted turn is silent until it is cancelled."""

    async def scenario() -> ScriptedTurn:
        sessions = ScriptedSessions(until_cancelled)
        app = create_app(Settings(), backend(sessions))
        services = app.state.services
        await services.backend.start()
        body = json.dumps({"input": "hi", "store": store, "stream": stream}).encode()
        gone = asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"host", b"127.0.0.1")],
            "asgi": {"version": "3.0", "spec_version": "2.4"},
        }
        request = asyncio.create_task(app(scope, receive, send))
        await sessions.begun.wait()
        await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait_for(request, 5)
        (turn,) = sessions.turns.values()
        was_cancelled = turn.cancelled.is_set()
        await turn.cancel()
        await turn.result()
        assert sessions.closed_scopes == [turn.spec.scope]
        assert was_cancelled is cancelled
        return turn

    asyncio.run(scenario())


def test_models_are_listed(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert client.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 128
    missing = client.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_unknown_paths_and_methods_are_told_in_json(client: TestClient) -> None:
    missing = client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = client.put("/v1/responses")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]


def test_every_answer_has_an_id_and_the_security_headers(client: TestClient) -> None:
    for path in ("/", "/healthz", "/v1/models", "/nowhere"):
        headers = client.get(path).headers
        assert headers["x-request-id"].startswith("req_")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_page_is_served(client: TestClient) -> None:
    assert client.get("/").headers["content-type"].startswith("text/html")


def test_a_failure_inside_is_told_by_an_id_only() -> None:
    class Broken(ScriptedSessions):
        async def begin(self, spec: Any) -> Any:
            raise ZeroDivisionError("secret detail")

    with client_of(Broken()) as client:
        answer = loaded(client).post("/v1/responses", json={"input": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "ZeroDivision" not in answer.text


def test_the_server_answers_while_it_loads() -> None:
    release = asyncio.Event()

    async def load(on_stage: OnStage) -> Parts:
        on_stage("model", 0.25)
        await release.wait()
        return await make(on_stage)

    make = backend(ScriptedSessions())._load
    with client_of(None, behind=Backend(load)) as client:
        assert client.get("/healthz").status_code == 200
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            503,
            {"status": "loading", "stage": "model", "fraction": 0.25},
        )
        refused = client.post("/v1/responses", json={"input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_loading")
        assert "retry-after" in refused.headers
        with (
            pytest.raises(WebSocketDenialResponse) as denied,
            client.websocket_connect("ws://127.0.0.1/v1/responses"),
        ):
            pass
        assert denied.value.status_code == 503
        assert client.get("/metrics").status_code == 200
        assert client.portal is not None
        client.portal.call(release.set)
        loaded(client)
        assert client.get("/readyz").json() == {"status": "ready", "model": MODEL}


def test_a_model_that_cannot_be_loaded_is_told_to_the_log_only() -> None:
    async def load(on_stage: OnStage) -> Parts:
        raise RuntimeError("/secret/path is missing")

    behind = Backend(load)
    with client_of(None, behind=behind) as client:
        loaded(client)
        answer = client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_unavailable")
        assert "secret" not in answer.text
    assert behind.failure == "/secret/path is missing"


def test_readiness_follows_the_engine() -> None:
    engine = ScriptedEngine()
    with client_of(ScriptedSessions(), engine=engine) as client:
        assert loaded(client).get("/readyz").status_code == 200
        engine.ready = False
        assert client.get("/readyz").json() == {"status": "engine restarting"}


def test_metrics_have_the_names_dashboards_know() -> None:
    engine = ScriptedEngine()
    engine.numbers = EngineStats(
        running=2,
        waiting=1,
        blocks_total=64,
        blocks_free=40,
        blocks_idle=8,
        blocks_pinned=14,
        blocks_reserved=2,
        blocks_shared=3,
        prefix_queries_tokens=100,
        prefix_hits_tokens=60,
        finished={"stop": 5, "length": 2},
    )
    with client_of(ScriptedSessions(), engine=engine) as client:
        text = loaded(client).get("/metrics").text
    samples = {
        (sample.name, sample.labels.get("state") or sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["pageturner:num_requests_running", None] == 2
    assert samples["pageturner:num_requests_waiting", None] == 1
    assert samples["pageturner:kv_cache_usage_perc", None] == 0.25
    assert samples["pageturner:prefix_cache_queries_total", None] == 100
    assert samples["pageturner:prefix_cache_hits_total", None] == 60
    assert samples["pageturner:request_success_total", "stop"] == 5
    blocks = {
        state: samples["pageturner:kv_blocks", state]
        for state in ("total", "free", "idle", "pinned", "reserved", "shared")
    }
    assert blocks == {"total": 64, "free": 40, "idle": 8, "pinned": 14, "reserved": 2, "shared": 3}
    assert samples["pageturner:cache_config_info", None] == 1
    assert samples["pageturner:ws_connections", None] == 0
    assert ("pageturner:ws_slow_closes_total", None) in samples


def test_what_is_asked_for_all_the_time_is_logged_for_debugging_only(client: TestClient) -> None:
    with structlog.testing.capture_logs() as lines:
        for path in ("/healthz", "/readyz", "/metrics", "/static/icon.svg", "/", "/v1/models"):
            assert client.get(path).status_code == 200
    levels = {line["path"]: line["log_level"] for line in lines if line["event"] == "request"}
    assert levels == {
        "/healthz": "debug",
        "/readyz": "debug",
        "/metrics": "debug",
        "/static/icon.svg": "debug",
        "/": "info",
        "/v1/models": "info",
    }
