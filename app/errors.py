"""What a refused or failed request looks like to a client. Internals stay in the log."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
import structlog

from engine.api import EngineDead, RequestError
from sessions.api import SessionError

log = structlog.get_logger()

REQUEST_PARAMS = {"max_tokens": "max_output_tokens"}
"""Where the engine's name of a field is not the one a Responses client sent."""


class ApiError(SessionError):
    """A request refused by the front door itself. `retry_after` is in seconds."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        status: int = 400,
        param: str | None = None,
        type: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, code=code, status=status, param=param, type=type)
        self.retry_after = retry_after


def brief(value: Any) -> str:
    """A value as an error message quotes it: short, and never a whole document."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    try:
        text = orjson.dumps(value[:61] if isinstance(value, str) else value).decode()
    except (TypeError, ValueError):
        return type(value).__name__
    return text if len(text) <= 62 else text[:60] + '..."'


def wrong(param: str, expected: str, value: Any, *, code: str = "invalid_request") -> ApiError:
    """The refusal of one field: its name, what was expected and what came."""
    return ApiError(f"{param} must be {expected}, got {brief(value)}", param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def server_busy(message: str, code: str, *, retry_after: int = 2) -> ApiError:
    """A refusal that passes by itself: loading, draining, too many connections."""
    return ApiError(message, code=code, status=503, type="server_error", retry_after=retry_after)


def as_refusal(exc: Exception, *, params: dict[str, str] = REQUEST_PARAMS) -> SessionError:
    """Any exception as what the client is told. What is unexpected gets an id and goes to the log."""
    if isinstance(exc, SessionError):
        return exc
    if isinstance(exc, RequestError):
        param = params.get(exc.param, exc.param) if exc.param else None
        message = exc.message
        if param and exc.param and message.startswith(exc.param):
            message = param + message[len(exc.param) :]
        return ApiError(message, code=exc.code, param=param)
    if isinstance(exc, EngineDead):
        return server_busy("The engine is restarting; try again in a moment.", "engine_restarting")
    error_id = secrets.token_hex(8)
    log.error("unexpected error", error_id=error_id, exc_info=exc)
    return ApiError(
        f"Something went wrong on the server (error id {error_id}).",
        code="internal_error",
        status=500,
        type="server_error",
    )


def error_object(exc: SessionError) -> dict[str, Any]:
    return {"message": exc.message, "type": exc.type, "param": exc.param, "code": exc.code}


def error_body(exc: SessionError) -> dict[str, Any]:
    """The body of a refused HTTP request."""
    return {"error": error_object(exc)}


def error_headers(exc: SessionError) -> dict[str, str]:
    retry_after = getattr(exc, "retry_after", None)
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    if exc.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_frame(exc: SessionError, stream_id: str | None = None) -> dict[str, Any]:
    """The `error` event of a websocket: nested, always with a status, tagged when the request was."""
    frame: dict[str, Any] = {"type": "error", "status": exc.status, "error": error_object(exc)}
    if stream_id is not None:
        frame["stream_id"] = stream_id
    return frame
