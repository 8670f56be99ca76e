"""A scripted stand-in for sessions and the engine, so that the front door can be tested without a model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import uvicorn

from app.backend import Backend, OnStage, Parts
from app.config import Settings
from app.main import create_app
from app.server import listen, uvicorn_config
from engine.api import EngineInfo, EngineStats, PromptUsage
from sessions import LiveTurn
from sessions.api import SessionError, TurnSpec
from sessions.ids import new_id
from sessions.response import new_response, usage
from sessions.turn import TurnWriter

MODEL = "scripted"
INFO = EngineInfo(
    boot_id="boot",
    model=MODEL,
    max_model_len=128,
    vocab_size=1000,
    eos_token_ids=[2],
    block_size=16,
    num_blocks=64,
    block_bytes=1024,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
)


class ScriptedEngine:
    """Only what `/readyz`, `/metrics` and `/v1/models` ask of an engine."""

    info = INFO

    def __init__(self) -> None:
        self.ready = True
        self.numbers = EngineStats(blocks_total=64, blocks_free=64)

    async def stats(self) -> EngineStats:
        return self.numbers


class ScriptedTurn(LiveTurn):
    """A turn whose answer a test writes."""

    def __init__(self, spec: TurnSpec) -> None:
        super().__init__(
            TurnWriter(new_response(new_id("resp"), spec, created_at=1, status="in_progress")),
            owner=spec.owner,
            scope=None if spec.store else spec.scope,
            conversation_id=spec.conversation_id,
            cancel_when_unwatched=spec.detach == "cancel",
        )
        self.spec = spec
        self.said = ""
        self.writer.created()
        self.writer.in_progress()

    def say(self, text: str) -> None:
        self.said += text
        self.writer.text(text)

    def end(self, status: Any = "completed", **fields: Any) -> None:
        counts = usage(PromptUsage(total=10, reused=4, computed=6), max(1, len(self.said.split())))
        self.writer.finish(status, completed_at=2, text=self.said, usage=counts, **fields)
        self.writer.emit()
        self.finish()


Script = Callable[[ScriptedTurn], Awaitable[None]]


async def hello(turn: ScriptedTurn) -> None:
    for word in ("Hello", " ", "world"):
        turn.say(word)
        await asyncio.sleep(0)
    turn.end()


async def until_cancelled(turn: ScriptedTurn) -> None:
    turn.say("thinking")
    await turn.cancelled.wait()
    turn.end("cancelled")


class ScriptedSessions:
    """Begins turns that follow `script`; remembers what it was asked."""

    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.specs: list[TurnSpec] = []
        self.turns: dict[str, ScriptedTurn] = {}
        self.closed_scopes: list[str] = []
        self.begun = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self.tasks)

    async def begin(self, spec: TurnSpec) -> ScriptedTurn:
        self.specs.append(spec)
        if spec.previous_response_id is not None and spec.previous_response_id not in self.turns:
            raise SessionError(
                f"There is no response {spec.previous_response_id}.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        turn = ScriptedTurn(spec)
        self.turns[turn.response_id] = turn
        self.begun.set()
        task = asyncio.create_task(cast(Any, self.script(turn)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return turn

    async def attach(self, owner: str, response_id: str, scope: str | None = None) -> ScriptedTurn:
        return self._turn(owner, response_id)

    async def cancel(self, owner: str, response_id: str, scope: str | None = None) -> None:
        turn = self._turn(owner, response_id)
        if turn.writer.log.closed:
            raise SessionError(f"{response_id} has ended.", code="response_not_active", param="response_id")
        await turn.cancel()

    async def response(self, owner: str, response_id: str) -> dict[str, Any]:
        return self._turn(owner, response_id).writer.response

    async def delete_response(self, owner: str, response_id: str) -> None:
        del self.turns[self._turn(owner, response_id).response_id]

    async def close_scope(self, scope: str) -> None:
        self.closed_scopes.append(scope)

    def _turn(self, owner: str, response_id: str) -> ScriptedTurn:
        turn = self.turns.get(response_id)
        if turn is None or turn.spec.owner != owner:
            raise SessionError(f"There is no response {response_id}.", code="response_not_found", status=404)
        return turn


def backend(sessions: Any, engine: Any | None = None, lost: asyncio.Event | None = None) -> Backend:
    """`lost`: when it is set, the engine is gone for good."""

    async def close() -> None:
        pass

    async def wait_lost() -> str:
        await (lost or asyncio.Event()).wait()
        return "the engine ended too often"

    async def load(on_stage: OnStage) -> Parts:
        on_stage("pretending", 0.5)
        return Parts(sessions, cast(Any, engine or ScriptedEngine()), MODEL, close, wait_lost)

    return Backend(load)


class LiveServer:
    """The application under the real uvicorn, on a thread with its own event loop."""

    def __init__(self, sessions: Any, settings: Settings) -> None:
        self.sessions = sessions
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.app = create_app(settings, backend(sessions))
        self.services = self.app.state.services
        self._server = uvicorn.Server(uvicorn_config(self.app, settings))
        self._thread = threading.Thread(target=self._run)
        self.loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, coroutine: Any) -> Any:
        """Run something on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._listener])

        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(main())

    def __enter__(self) -> LiveServer:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
        self.call(self.services.backend.loaded.wait())
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def live_server(sessions: Any, **settings: Any) -> Iterator[LiveServer]:
    with LiveServer(sessions, Settings(**settings)) as server:
        yield server
