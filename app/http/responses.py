"""`/v1/responses` over HTTP: the same turns as over the websocket, one a request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from app.errors import wrong
from app.http.replies import JSON, SSE_DONE, EventStream, sse_event, while_connected
from app.http.routing import Call, route
from app.models import ResponseCreate, validate
from app.services import Services
from app.specs import turn_spec
from app.tasks import closing
from sessions import Turn as AnyTurn
from sessions.api import Event, TurnSpec

if TYPE_CHECKING:
    pass


def response_routes() -> list[BaseRoute]:
    return [
        route("/v1/responses", create, ["POST"]),
        route("/v1/responses/{id}", retrieve, ["GET"]),
        route("/v1/responses/{id}", delete, ["DELETE"]),
        route("/v1/responses/{id}/cancel", cancel, ["POST"]),
    ]


async def create(call: Call) -> Response:
    body = validate(ResponseCreate, await call.json())
    services = call.services
    scope = f"http_{secrets.token_hex(8)}"
    spec = turn_spec(body, owner=call.owner, scope=scope, model=services.served_model_name)
    turn = Turn(services, spec)
    await turn.begin()
    if body.stream:
        return EventStream(_frames(turn.events()))
    return JSON(await turn.result(call))


async def retrieve(call: Call) -> Response:
    found = await call.services.sessions.attach(call.owner, call.path("id"))
    query = call.request.query_params
    if query.get("stream") == "true":
        after = query.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise wrong("starting_after", "a sequence number of at least 0", after)
        return EventStream(_frames(found.events(int(after))))
    return JSON(await call.services.sessions.response(call.owner, call.path("id")))


async def delete(call: Call) -> Response:
    name = call.path("id")
    await call.services.sessions.delete_response(call.owner, name)
    return JSON({"id": name, "object": "response", "deleted": True})


async def cancel(call: Call) -> Response:
    """Idempotent: a response that has ended already is returned as it is."""
    found = await call.services.sessions.attach(call.owner, call.path("id"))
    await found.cancel()
    return JSON(await found.result())


class Turn:
    """One turn over HTTP, from its beginning until its scope is closed. The request is its one watcher."""

    def __init__(self, services: Services, spec: TurnSpec) -> None:
        self._services = services
        self._spec = spec
        self._found: AnyTurn | None = None

    async def begin(self) -> None:
        with self._services.turn_running():
            self._found = await self._services.sessions.begin(self._spec)

    async def events(self) -> AsyncIterator[Event]:
        """Closing this iterator early is the client's going."""
        if self._found is None:
            raise RuntimeError("the turn has not begun")
        try:
            with self._services.turn_running():
                async with closing(self._found.events()) as events:
                    async for event in events:
                        yield event
        finally:
            await self._services.sessions.close_scope(self._spec.scope or "")

    async def result(self, call: Call) -> dict[str, Any]:
        """The finished response. Raises `ClientDisconnect` when nobody waits for it any more."""
        return await while_connected(self._last_response(), call.request.receive)

    async def _last_response(self) -> dict[str, Any]:
        response: dict[str, Any] = {}
        async with closing(self.events()) as events:
            async for event in events:
                response = event.get("response", response)
        return response


async def _frames(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    async with closing(events):
        async for event in events:
            yield sse_event(event)
    yield SSE_DONE
