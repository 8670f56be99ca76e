"""The HTTP responses and body readers every route uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.errors import ApiError
from app.tasks import cancelled, closing
from app.wire import decode_json

T = TypeVar("T")


class JSON(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def read_json(request: Request, limit: int) -> Any:
    """The body as JSON; an empty one is an empty object. Raises `ApiError` for one over `limit` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            message = f"The request body is larger than {limit} bytes."
            raise ApiError(message, code="request_too_large", status=413)
    return decode_json(bytes(body)) if body else {}


class EventStream(Response):
    """Server-sent events from an iterator of ready-made frames.

    The iterator is closed as soon as the client goes, also while it is waiting for the first token; an answer
    that nobody can read any more is then nobody's burden.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stream() -> None:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with contextlib.suppress(ClientDisconnect, OSError):
            async with closing(self._frames):
                await while_connected(stream(), receive)


async def while_connected(work: Coroutine[Any, Any, T], receive: Callable[[], Awaitable[Message]]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises `ClientDisconnect` then."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancelled(task for task in (task, watch) if not task.done())


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse_data(data: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(data)


def sse_event(event: dict[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\n" + sse_data(event)


SSE_DONE = b"data: [DONE]\n\n"
