"""The load generator, in small, on a real server whose answers are written down."""

import asyncio

import pytest

from bench.load import compare, named
from bench.targets import ChatTarget, WebsocketTarget
from bench.workload import Workload
from tests.app.support import MODEL, LiveServer, ScriptedSessions, ScriptedTurn, live_server

SMALL = Workload(turns=3, words_in=4, tokens_out=8, system_words=6)


def targets(server: LiveServer) -> list[WebsocketTarget | ChatTarget]:
    return [
        WebsocketTarget("ours", f"ws://{server.address}/v1/responses", MODEL),
        ChatTarget("theirs", f"http://{server.address}", MODEL),
    ]


def test_a_load_prints_one_row_for_each_server_and_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(ScriptedSessions()) as server:
        asyncio.run(compare(list(targets(server)), SMALL, [1, 2], rounds=1))
    # The server, which runs in this process here, logs between them.
    rows = [line for line in capsys.readouterr().out.splitlines() if " C=" in line]
    assert [row.split()[:2] for row in rows] == [
        ["ours", "C=1"],
        ["theirs", "C=1"],
        ["ours", "C=2"],
        ["theirs", "C=2"],
    ]
    # What the scripted answers report: 10 prompt tokens a turn, 4 of them reused.
    assert [row.split("|")[-1].split() for row in rows] == [
        ["prompt", str(30 * load), "cached", str(12 * load)] for load in (1, 1, 2, 2)
    ]


def test_a_websocket_sends_new_text_only_and_a_chat_client_everything() -> None:
    sessions = ScriptedSessions()
    with live_server(sessions) as server:
        for target in targets(server):
            sessions.specs.clear()
            asyncio.run(compare([target], SMALL, [1], rounds=1))
            specs = sessions.specs[-SMALL.turns :]
            lengths = [len(spec.input) for spec in specs]
            named_parents = [spec.previous_response_id is not None for spec in specs]
            if target.name == "ours":
                assert lengths == [1, 1, 1]
                assert named_parents == [False, True, True]
            else:
                assert lengths[0] < lengths[1] < lengths[2]
                assert named_parents == [False, False, False]


def test_an_answer_that_fails_ends_the_load() -> None:
    async def fail(turn: ScriptedTurn) -> None:
        turn.end("failed", error={"code": "server_error", "message": "It broke."})

    with live_server(ScriptedSessions(fail)) as server, pytest.raises(RuntimeError, match="It broke"):
        asyncio.run(compare(list(targets(server))[:1], SMALL, [1], rounds=1))


def test_servers_can_be_given_a_name() -> None:
    assert named("vllm=http://h:1", "chat") == ("vllm", "http://h:1")
    assert named("http://h:1/a?b=c", "chat") == ("chat", "http://h:1/a?b=c")


def test_no_load_finds_the_texts_of_an_earlier_one() -> None:
    sessions = ScriptedSessions()
    with live_server(sessions) as server:
        asyncio.run(compare(list(targets(server))[:1], SMALL, [1], rounds=2))
    asked = [str(spec.input) for spec in sessions.specs[-2 * SMALL.turns :]]
    assert len(set(asked)) == 2 * SMALL.turns


def test_a_conversation_of_one_number_always_says_the_same() -> None:
    assert SMALL.user_texts(5) == SMALL.user_texts(5) != SMALL.user_texts(6)
    assert [len(text.split()) for text in SMALL.user_texts(1)] == [4, 4, 4]
