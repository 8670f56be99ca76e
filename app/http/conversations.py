"""`/v1/conversations`: the list, one conversation, and its items."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from app.http.replies import JSON
from app.http.routing import Call, listing, route
from app.items import input_items
from app.models import ConversationCreate, ConversationUpdate, validate


def conversation_routes() -> list[BaseRoute]:
    return [
        route("/v1/conversations", list_all, ["GET"]),
        route("/v1/conversations", create, ["POST"]),
        route("/v1/conversations/{id}", retrieve, ["GET"]),
        route("/v1/conversations/{id}", update, ["POST"]),
        route("/v1/conversations/{id}", delete, ["DELETE"]),
        route("/v1/conversations/{id}/items", items, ["GET"]),
    ]


async def list_all(call: Call) -> Response:
    """Newest activity first. The official API has no such list; pages need one."""
    limit = call.limit()
    after = call.request.query_params.get("after")
    found = await call.services.sessions.conversations(call.owner, limit=limit + 1, after=after)
    return listing(found[:limit], has_more=len(found) > limit)


async def create(call: Call) -> Response:
    body = validate(ConversationCreate, await call.json())
    created = await call.services.sessions.create_conversation(
        call.owner, items=input_items(body.items or [], "items"), metadata=body.metadata or {}
    )
    return JSON(created)


async def retrieve(call: Call) -> Response:
    return JSON(await call.services.sessions.conversation(call.owner, call.path("id")))


async def update(call: Call) -> Response:
    body = validate(ConversationUpdate, await call.json())
    sessions = call.services.sessions
    return JSON(await sessions.update_conversation(call.owner, call.path("id"), body.metadata, rev=body.rev))


async def delete(call: Call) -> Response:
    name = call.path("id")
    await call.services.sessions.delete_conversation(call.owner, name)
    return JSON({"id": name, "object": "conversation.deleted", "deleted": True})


async def items(call: Call) -> Response:
    order = call.order("desc")
    limit = call.limit()
    after = call.request.query_params.get("after")
    found = await call.services.sessions.conversation_items(
        call.owner, call.path("id"), limit=limit + 1, after=after, order=order
    )
    return listing(found[:limit], has_more=len(found) > limit)
