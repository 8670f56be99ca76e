"""Running the application under uvicorn, and ending it without cutting anybody off."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import structlog
import uvicorn
from starlette.applications import Starlette

from app.backend import Status
from app.config import Settings, SettingsError
from app.services import Services
from app.tasks import cancelled
from app.websocket_protocol import AbortableWebSocket

log = structlog.get_logger()

SEND_BUFFER_BYTES = 128 * 1024
"""Kernel buffer of one connection: what a client that does not read can hold back without our noticing."""

CLOSE_SECONDS = 5
PING_SECONDS = 20.0
EXIT_FAILED = 1


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `SettingsError` when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as exc:
        raise SettingsError(f"host: cannot listen on {host}: {exc.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise SettingsError(f"port: cannot listen on {host} port {port}: {exc.strerror}") from None
    listener.setblocking(False)
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn closes every websocket when it is told to exit; this one lets running answers finish first.

    The first SIGTERM or SIGINT begins the drain, a second one ends it.
    """

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def handle(_signal: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.stop)

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())
        else:
            self.force_exit = self.should_exit = True

    async def _drain_and_exit(self) -> None:
        timeout = self._services.settings.drain_timeout
        log.info("draining", connections=len(self._services.connections), timeout_seconds=timeout)
        if not await self._services.drain(timeout):
            log.warning("drain timeout reached; running answers are cut off")
        self.should_exit = True


def uvicorn_config(app: Starlette, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws=AbortableWebSocket,
        ws_max_size=settings.max_frame_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        access_log=False,
        log_config=None,
        server_header=False,
        lifespan="on",
    )


def run(
    app: Starlette,
    settings: Settings,
    listener: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until told to stop. Returns the exit status: not 0 when there was no engine, or none any more."""
    services: Services = app.state.services
    server = DrainingServer(uvicorn_config(app, settings), services)

    async def serve() -> None:
        watching = asyncio.create_task(_watch_backend(services, server, on_ready))
        try:
            await server.serve(sockets=[listener])
        finally:
            await cancelled([watching])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(serve())
    return EXIT_FAILED if services.backend.failure is not None else 0


async def _watch_backend(services: Services, server: uvicorn.Server, on_ready: Callable[[], None]) -> None:
    """End the server when nothing is behind it: whoever runs it sees that, and can start it anew."""
    await services.backend.loaded.wait()
    if services.backend.status is Status.READY:
        on_ready()
        await services.backend.wait_lost()
    server.should_exit = True
