"""One websocket: a reader task, a writer task and the turns between them.

Two sides, each with its own end. The client's side ends when its close (or its loss) is read; ours ends when
the writer has sent the last frame. The reader never waits for a turn or for the client to read, so pings are
always answered; only the writer waits for the client, and only up to the send deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.errors import ApiError, as_refusal, error_frame, server_busy
from app.lanes import Lanes, QueuedTurn
from app.models import ResponseCreate, validate
from app.outbox import Close, Outbox, OutboxFull
from app.principal import Principal
from app.specs import turn_spec
from app.tasks import cancelled, closing
from app.websocket_protocol import ABORT
from app.wire import Attach, Cancel, Codec, Create, FrameError, Ping, parse_event
from sessions.api import Event

if TYPE_CHECKING:
    from app.services import Services

log = structlog.get_logger()

MAX_VIEWERS = 64
"""Responses one connection may watch by `response.attach` at the same time."""

POLICY_VIOLATION = 1008
SERVICE_RESTART = 1012
SLOW_CONSUMER = 4008


class Phase(enum.Enum):
    """What this side of the connection does. It only moves down this list."""

    OPEN = "takes turns"
    DRAINING = "finishes what runs, takes no turns"
    CLOSED = "sends nothing more"


class Connection:
    """Serves one accepted websocket until either side ends it."""

    def __init__(self, websocket: WebSocket, services: Services, principal: Principal, codec: Codec) -> None:
        limits = services.settings
        self.phase = Phase.OPEN
        self.outbox = Outbox(limits.outbox_bytes, codec.encode)
        self._scope = f"ws_{secrets.token_hex(8)}"
        self._websocket = websocket
        self._services = services
        self._principal = principal
        self._codec = codec
        self._send_deadline = limits.send_deadline
        self._lanes = Lanes(self._run_turn, depth=limits.queue_depth)
        self._viewers: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.phase = Phase.CLOSED
            await self._services.background.finish(self._leave(reader, writer))

    def drain(self) -> None:
        """Take no new turns; close as soon as nothing runs, so that the client reconnects elsewhere."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.DRAINING
            self._close_if_drained()

    @property
    def idle(self) -> bool:
        return self._lanes.idle and not self._viewers

    # The client's side.

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("text")
            if frame is None:
                frame = message["bytes"]
            try:
                await self._handle(frame)
            except FrameError as exc:
                self._answer(error_frame(exc.refusal, exc.stream_id))
            except OutboxFull:
                # It writes and does not read; nothing that is added here would ever be seen.
                self._services.metrics.slow_closes.inc()
                await self._abort(SLOW_CONSUMER, "slow consumer")
                return

    async def _handle(self, frame: str | bytes) -> None:
        if self._principal.expired():
            refusal = ApiError("The sign-in has expired.", code="session_expired", status=401)
            self._answer(error_frame(refusal))
            self.outbox.close(POLICY_VIOLATION, "session expired")
            return
        try:
            event = parse_event(self._codec.decode(frame))
        except FrameError:
            raise
        except Exception as exc:
            # A fault of ours in reading one frame must not take the socket down.
            raise FrameError(as_refusal(exc)) from None
        stream_id = getattr(event, "stream_id", None)
        try:
            if isinstance(event, Create):
                self._create(event)
            elif isinstance(event, Cancel):
                await self._cancel(event)
            elif isinstance(event, Attach):
                self._attach(event)
            elif isinstance(event, Ping):
                self._answer({"type": "pong"})
        except OutboxFull:
            raise
        except Exception as exc:
            self._answer(error_frame(as_refusal(exc), stream_id))

    def _create(self, event: Create) -> None:
        if self.phase is not Phase.OPEN:
            raise server_busy("The server is shutting down; reconnect in a moment.", "server_draining")
        self._lanes.submit(QueuedTurn(event.body, event.stream_id))

    def _attach(self, event: Attach) -> None:
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"This connection watches {MAX_VIEWERS} responses already."
            raise ApiError(message, code="too_many_attachments", status=429, type="rate_limit_error")
        viewer = asyncio.create_task(self._view(event))
        self._viewers.add(viewer)
        viewer.add_done_callback(self._viewer_left)

    def _viewer_left(self, viewer: asyncio.Task[None]) -> None:
        self._viewers.discard(viewer)
        self._close_if_drained()

    async def _cancel(self, event: Cancel) -> None:
        if event.response_id is not None:
            await self._services.sessions.cancel(self._principal.owner, event.response_id, self._scope)
            return
        dropped = self._lanes.drop_waiting(event.stream_id)
        turn = self._lanes.current(event.stream_id)
        if turn is None and not dropped:
            message = "Nothing is running on this lane."
            raise ApiError(message, code="response_not_active", param="stream_id")
        for waiting in dropped:
            self._answer(error_frame(_cancelled(), waiting.stream_id))
        if turn is not None:
            turn.cancelled.set()
            if turn.live is not None:
                await turn.live.cancel()

    # What is between.

    async def _run_turn(self, turn: QueuedTurn) -> None:
        try:
            with self._services.turn_running():
                await self._follow_turn(turn)
        except Exception as exc:
            await self.outbox.put(_tagged(error_frame(as_refusal(exc)), turn.stream_id), turn)
        finally:
            # The lane still counts this turn as running until it looks for the next one.
            asyncio.get_running_loop().call_soon(self._close_if_drained)

    async def _follow_turn(self, turn: QueuedTurn) -> None:
        if turn.cancelled.is_set():
            raise _cancelled()
        body = validate(ResponseCreate, turn.body, "response")
        spec = turn_spec(
            body, owner=self._principal.owner, scope=self._scope, model=self._services.served_model_name
        )
        turn.live = live = await self._services.sessions.begin(spec)
        if turn.cancelled.is_set():
            await live.cancel()
        await self._pump(live.events(), turn.stream_id, turn)

    async def _view(self, event: Attach) -> None:
        source = object()
        try:
            found = await self._services.sessions.attach(
                self._principal.owner, event.response_id, scope=self._scope
            )
            await self._pump(found.events(event.starting_after), event.stream_id, source)
        except Exception as exc:
            await self.outbox.put(_tagged(error_frame(as_refusal(exc)), event.stream_id), source)

    async def _pump(self, events: AsyncIterator[Event], stream_id: str | None, source: object) -> None:
        async with closing(events):
            async for event in events:
                await self.outbox.put(_tagged(event, stream_id), source)

    def _answer(self, event: Event) -> None:
        self.outbox.put_now(event)

    def _close_if_drained(self) -> None:
        if self.phase is Phase.DRAINING and self.idle:
            self.outbox.close(SERVICE_RESTART, "server restarting")

    # Our side.

    async def _write(self) -> None:
        while True:
            frame = await self.outbox.take()
            try:
                async with asyncio.timeout(self._send_deadline):
                    if isinstance(frame, Close):
                        await self._websocket.close(frame.code, frame.reason)
                        return
                    await self._send(frame)
            except TimeoutError:
                self._services.metrics.slow_closes.inc()
                log.warning("slow consumer closed", waiting_bytes=self.outbox.size)
                await self._abort(SLOW_CONSUMER, "slow consumer")
                return
            except (WebSocketDisconnect, RuntimeError):
                return

    async def _send(self, frame: bytes) -> None:
        if self._codec.binary:
            await self._websocket.send_bytes(frame)
        else:
            await self._websocket.send_text(frame.decode())

    async def _abort(self, code: int, reason: str) -> None:
        """Close without waiting for the client to read, which is what an ordinary close does."""
        abort = self._websocket.scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort(code, reason)
            return
        with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(1.0):
                await self._websocket.close(code, reason)

    async def _leave(self, *tasks: asyncio.Task[None]) -> None:
        """Nobody watches from here any more; sessions end what was not to outlive its watchers."""
        await cancelled([*tasks, *self._viewers])
        await self._lanes.close()
        await self._services.sessions.close_scope(self._scope)


def _tagged(event: Event, stream_id: str | None) -> Event:
    return event if stream_id is None else {**event, "stream_id": stream_id}


def _cancelled() -> ApiError:
    return ApiError("The response was cancelled before it began.", code="response_cancelled", status=409)
