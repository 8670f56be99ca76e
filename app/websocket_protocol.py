"""uvicorn's websocket protocol, plus what it lacks: ways to close on a client that is not listening."""

from __future__ import annotations

from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

ABORT = "pageturner.abort"
"""Name of the scope extension: a function of close code and reason."""

LAST_WORDS_SECONDS = 5.0
"""How long a close frame may take to get through behind what is buffered already."""

LINGER_SECONDS = 1.0
"""How long a client that is still sending may take to notice a close frame."""


class AbortableWebSocket(WebSocketsSansIOProtocol):
    """Gives the application `abort`, and lets a client that sends too much learn why it is closed."""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[ABORT] = self.abort

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refusal is a whole answer; uvicorn would log an error, that none was given.
            self.handshake_complete = True

    def abort(self, code: int, reason: str) -> None:
        """Write a close frame behind what is buffered, and cut the connection if it does not get through.

        An ASGI `websocket.close` would wait until the client has read what was sent before.
        """
        if self.disconnected or self.close_sent or self.transport.is_closing():
            return
        self.conn.send_close(code, reason)
        self._last_frame(code, reason)
        self.transport.close()
        self.loop.call_later(LAST_WORDS_SECONDS, self.transport.abort)

    def handle_parser_exception(self) -> None:
        """Close after a frame that is too large or broken, reading and dropping what the client still sends.

        Closing at once, with unread data, resets the connection and takes the close frame away with it.
        """
        if self.close_sent:
            return
        assert self.conn.close_sent is not None
        self._last_frame(self.conn.close_sent.code, self.conn.close_sent.reason)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _last_frame(self, code: int, reason: str) -> None:
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
