"""From a request to an endpoint and back: the asker, the services, and one place where exceptions end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from app.errors import ApiError, as_refusal, error_body, error_headers, wrong
from app.http.replies import JSON, read_json
from app.principal import Principal
from app.services import Services

CLIENT_CLOSED_REQUEST = 499
MAX_PAGE = 100


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, with what an endpoint needs beside it."""

    request: Request
    services: Services

    @property
    def owner(self) -> str:
        principal: Principal = self.request.state.principal
        return principal.owner

    async def json(self) -> Any:
        return await read_json(self.request, self.services.settings.max_frame_bytes)

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value

    def limit(self) -> int:
        """The query's page size. Raises `ApiError`."""
        text = self.request.query_params.get("limit", "20")
        if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MAX_PAGE):
            raise wrong("limit", f"a whole number from 1 to {MAX_PAGE}", text)
        return int(text)

    def order(self, default: str) -> str:
        order = self.request.query_params.get("order", default)
        if order not in ("asc", "desc"):
            raise wrong("order", "asc or desc", order)
        return order


Endpoint = Callable[[Call], Awaitable[Response]]


def route(path: str, endpoint: Endpoint, methods: Sequence[str]) -> Route:
    async def serve(request: Request) -> Response:
        try:
            return await endpoint(Call(request, request.app.state.services))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as exc:
            refusal = as_refusal(exc)
            return JSON(error_body(refusal), refusal.status, error_headers(refusal))

    return Route(path, serve, methods=list(methods))


async def http_error(request: Request, exc: Exception) -> Response:
    """404 and 405 in the same form as every other error."""
    assert isinstance(exc, HTTPException)
    path, method = request.url.path, request.method
    message = (
        f"{method} is not possible on {path}." if exc.status_code == 405 else f"There is no {path} here."
    )
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error")
    refusal = ApiError(message, code=code, status=exc.status_code)
    return JSON(error_body(refusal), exc.status_code, dict(exc.headers or {}))


def listing(data: list[dict[str, Any]], *, has_more: bool) -> JSON:
    """One page in the form all lists have."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return JSON({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})
