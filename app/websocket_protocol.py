"""uvicorn's websocket protocol, plus the one thing it lacks: closing on a client that does not read."""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

ABORT = "pageturner.abort"
"""Name of the scope extension: a function of close code and reason."""

LAST_WORDS_SECONDS = 5.0
"""How long the close frame may take to get through behind what is buffered already."""


class AbortableWebSocket(WebSocketsSansIOProtocol):
    """An ASGI `websocket.close` waits until the client has read what was sent; `abort` does not."""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[ABORT] = self.abort

    def abort(self, code: int, reason: str) -> None:
        """Write a close frame behind what is buffered, and cut the connection if it does not get through."""
        if self.disconnected or self.close_sent or self.transport.is_closing():
            return
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.close()
        self.loop.call_later(LAST_WORDS_SECONDS, self.transport.abort)
