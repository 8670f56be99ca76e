"""Conversations as clients see them: create, list, rename, read, delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sessions.api import Item, SessionError
from sessions.store import ConversationRecord, Store, TurnRecord


def conversation_object(record: ConversationRecord) -> dict[str, Any]:
    """The protocol's object, and what a page needs: revision, newest turn, the turn being written."""
    return {
        "id": record.id,
        "object": "conversation",
        "created_at": record.created_ms // 1000,
        "metadata": record.metadata,
        "updated_at": record.updated_ms // 1000,
        "rev": record.rev,
        "last_response": record.leaf,
        "active_response": record.active,
    }


def items_of(chain: Sequence[TurnRecord]) -> list[Item]:
    """What was said along a path, oldest first. Each item names the response it belongs to."""
    items: list[Item] = []
    for record in chain:
        if not record.deleted:
            said = [*record.input, *record.response["output"]]
            items += ({**item, "response_id": record.id} for item in said)
    return items


def slice_of(items: Sequence[Item], *, after: str | None, limit: int, order: str) -> list[Item]:
    """Up to `limit` items beyond the one named `after`. Raises `SessionError` when there is no such one."""
    if limit < 1:
        raise SessionError(f"limit must be at least 1, got {limit}", param="limit")
    if order not in ("asc", "desc"):
        raise SessionError(f'order must be "asc" or "desc", got {order!r}', param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise SessionError(f"after: there is no item {after!r}", param="after")
        start = places[0] + 1
    return ordered[start : start + limit]


async def owned(store: Store, owner: str, conversation_id: str) -> ConversationRecord:
    """Raises `SessionError` 404 for one that is not there or somebody else's: nobody learns which."""
    record = await store.conversation(conversation_id)
    if record is None or record.owner != owner:
        raise conversation_not_found(conversation_id)
    return record


def conversation_not_found(conversation_id: str) -> SessionError:
    return SessionError(
        f"Conversation with id {conversation_id!r} not found.",
        code="conversation_not_found",
        status=404,
        param="conversation",
    )
