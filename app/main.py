"""The application: every route behind the gate, and the back end's life around it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from app.backend import Backend
from app.config import Settings
from app.connection import Connection
from app.errors import ApiError, error_body, error_headers, server_busy
from app.gate import Gate, deny
from app.http.chat_completions import chat_routes
from app.http.conversations import conversation_routes
from app.http.replies import JSON
from app.http.responses import response_routes
from app.http.routing import http_error
from app.http.system import system_routes
from app.metrics import Metrics
from app.page import page_routes
from app.principal import Keys
from app.services import Services
from app.tasks import cancelled
from app.wire import MSGPACK_SUBPROTOCOL, Codec

log = structlog.get_logger()

# Asked for all the time, and telling nothing: probes, and the files of the page, thirty for each visit.
QUIET_PATHS = ("/healthz", "/readyz", "/metrics", "/static/")


def create_app(settings: Settings, backend: Backend, metrics: Metrics | None = None) -> Starlette:
    """The ASGI application. `app.state.services` is how a server drains it."""
    keys = Keys(settings.keys)
    services = Services(settings, backend, metrics or Metrics())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(backend.start())
        try:
            yield
        finally:
            await cancelled([loading])
            await services.background.wait()
            await backend.close()

    middleware = [Middleware(RequestLog)]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["Authorization", "Content-Type"],
            )
        )
    middleware.append(
        Middleware(Gate, keys=keys, allowed_hosts=settings.hosts, allowed_origins=settings.allowed_origins)
    )
    app = Starlette(
        routes=[
            WebSocketRoute("/v1/responses", websocket),
            *response_routes(),
            *chat_routes(),
            *conversation_routes(),
            *system_routes(keys),
            *page_routes(),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: http_error},
        lifespan=lifespan,
    )
    app.state.services = services
    return app


async def websocket(socket: WebSocket) -> None:
    """Refuse with plain HTTP what cannot be served, else accept and serve until either side ends it."""
    services: Services = socket.app.state.services
    try:
        _ = services.sessions
        if services.draining:
            raise server_busy("The server is shutting down; reconnect in a moment.", "server_draining")
        if len(services.connections) >= services.settings.max_sockets:
            message = f"This server has {services.settings.max_sockets} websockets open already."
            raise ApiError(
                message, code="too_many_connections", status=429, type="rate_limit_error", retry_after=10
            )
    except ApiError as exc:
        await deny(socket, JSON(error_body(exc), exc.status, error_headers(exc)))
        return
    binary = MSGPACK_SUBPROTOCOL in socket.scope["subprotocols"]
    connection = Connection(socket, services, socket.state.principal, Codec(binary=binary))
    # Counted before the first await, so that a burst cannot slip past the limit.
    services.connections.add(connection)
    try:
        await socket.accept(MSGPACK_SUBPROTOCOL if binary else None)
        await connection.serve()
    finally:
        services.connections.discard(connection)


class RequestLog:
    """One line a request, with an id that the client sees too. Neither queries nor bodies are logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(8)}"
        started = time.perf_counter()
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, watch)
            finally:
                level = "debug" if scope["path"].startswith(QUIET_PATHS) else "info"
                getattr(log, level)(
                    "request",
                    method=scope.get("method", "WEBSOCKET"),
                    path=scope["path"],
                    status=status,
                    seconds=round(time.perf_counter() - started, 4),
                )
