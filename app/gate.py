"""What every request passes first: Host, Origin, who asks; and the headers every answer carries.

Everything needs a known principal unless its path is on the short list of public ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from app.errors import ApiError, error_body, error_headers
from app.http.replies import JSON
from app.principal import Keys

PUBLIC_PATHS = frozenset({"/", "/healthz", "/readyz", "/metrics", "/login", "/logout", "/favicon.ico"})
PUBLIC_FOLDER = "/static/"
UNGUARDED_HOST_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Probes and scrapers name a container's address; nothing private is told on these paths."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {"http": 80, "https": 443}

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Gate:
    """Refuses with 401 or 403 before anything else sees a request; a websocket is refused before it opens.

    allowed_hosts: names a request may be addressed to; "*" is any. allowed_origins: pages of other origins
    that may talk to this server, as scheme://host[:port]. A page of the server's own origin always may.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._origins = frozenset(filter(None, map(_origin_key, allowed_origins)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check_host(connection)
            self._check_origin(connection)
            self._identify(connection)
        except ApiError as exc:
            await _refuse(exc, scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check_host(self, connection: HTTPConnection) -> None:
        if "*" in self._hosts or connection.url.path in UNGUARDED_HOST_PATHS:
            return
        host = _split(f"//{connection.headers.get('host', '')}")
        if host is None or (host.hostname or "") not in self._hosts:
            message = "This server does not answer to that host name; see the setting allowed_hosts."
            raise ApiError(message, code="host_not_allowed", status=403)

    def _check_origin(self, connection: HTTPConnection) -> None:
        origin = connection.headers.get("origin")
        upgrade = connection.scope["type"] == "websocket"
        if origin is None or (not upgrade and connection.scope["method"] in SAFE_METHODS):
            return
        if not self._origin_allowed(connection, origin):
            message = "Pages of that origin may not talk to this server; see the setting allowed_origins."
            raise ApiError(message, code="origin_not_allowed", status=403)

    def _origin_allowed(self, connection: HTTPConnection, origin: str) -> bool:
        key = _origin_key(origin)
        if key is None:
            return False
        if key in self._origins:
            return True
        scheme, hostname, port = key
        if connection.scope["scheme"] in ("https", "wss") and scheme != "https":
            return False
        # Behind a proxy that ends TLS we see http; the Host header is still the one the browser sent.
        host = _split(f"//{connection.headers.get('host', '')}")
        return host is not None and (host.hostname, host.port or DEFAULT_PORTS[scheme]) == (hostname, port)

    def _identify(self, connection: HTTPConnection) -> None:
        path = connection.url.path
        principal = self._keys.principal(connection)
        upgrade = connection.scope["type"] == "websocket"
        if principal is None:
            if not upgrade and (path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER)):
                return
            message = "An API key is needed: send it as Authorization: Bearer KEY, or sign in on the page."
            raise ApiError(message, code="invalid_api_key", status=401, type="authentication_error")
        if upgrade and principal.by_cookie and "origin" not in connection.headers:
            # Browsers always send an Origin with an upgrade; a cookie without one comes from elsewhere.
            raise ApiError("A cookie needs an Origin header.", code="origin_not_allowed", status=403)
        connection.state.principal = principal


async def _refuse(exc: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response: Response = JSON(error_body(exc), exc.status, error_headers(exc))
    if scope["type"] == "http":
        await response(scope, receive, send)
        return
    await deny(WebSocket(scope, receive, send), response)


async def deny(websocket: WebSocket, response: Response) -> None:
    """Answer an upgrade with plain HTTP; where the server cannot, close it (which it turns into a 403)."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close()


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for a port that is no number
    except ValueError:
        return None
    return parts


def _origin_key(origin: str) -> tuple[str, str, int] | None:
    """An origin in comparable form; None for "null" and whatever else is no web origin."""
    parts = _split(origin.strip())
    if parts is None or parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        return None
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        return None
    return parts.scheme, parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]
