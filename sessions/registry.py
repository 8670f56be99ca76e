"""Finding a turn by its id: who may name it, and where it is."""

from __future__ import annotations

from sessions.api import SessionError
from sessions.lru import BoundedMap
from sessions.store import Store, TurnRecord
from sessions.tree import TurnNode

MAX_NODES = 4096
MAX_SCOPED = 256
"""Turns with `store=False` that one connection may name, newest first."""


class Registry:
    """Turns that can be gone on from. Stored ones are cached here; the others exist here and nowhere else."""

    def __init__(self, store: Store, limit: int = MAX_NODES) -> None:
        self._store = store
        self._cached: BoundedMap[str, TurnNode] = BoundedMap(limit)
        self._scopes: dict[str, BoundedMap[str, TurnNode]] = {}

    def add(self, node: TurnNode) -> None:
        """Make a finished turn nameable: a scoped one by its connection only, a stored one by its owner."""
        if node.scope is None:
            self._cached.put(node.id, node)
        else:
            self._scopes.setdefault(node.scope, BoundedMap(MAX_SCOPED)).put(node.id, node)

    def scoped(self, owner: str, response_id: str, scope: str | None) -> TurnNode | None:
        """A turn that only this connection may name."""
        nodes = self._scopes.get(scope) if scope is not None else None
        node = nodes.get(response_id) if nodes is not None else None
        return node if node is not None and node.owner == owner else None

    def close_scope(self, scope: str) -> list[TurnNode]:
        """Forget all that only this connection could name."""
        nodes = self._scopes.pop(scope, None)
        return list(nodes.values()) if nodes is not None else []

    def forget(self, response_id: str, scope: str | None = None) -> TurnNode | None:
        nodes = self._scopes.get(scope) if scope is not None else self._cached
        return nodes.pop(response_id) if nodes is not None else None

    async def find(self, owner: str, response_id: str, scope: str | None) -> TurnNode:
        """A turn that may be gone on from. Raises `SessionError` that names `previous_response_id`."""
        node = self.scoped(owner, response_id, scope) or self._cached.get(response_id)
        if node is None:
            node = self._linked(await self._store.chain(response_id))
        if node is None or node.owner != owner:
            raise previous_not_found(response_id)
        if node.status == "in_progress":
            raise previous_in_progress(response_id)
        if node.status == "failed":
            raise SessionError(
                f"Response {response_id!r} failed, so nothing can be added to it. Name the one before it.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return node

    def _linked(self, records: list[TurnRecord]) -> TurnNode | None:
        """Stored turns, the first one first, as nodes. None if the last one may not be named."""
        node: TurnNode | None = None
        for record in records:
            node = self._cached.get(record.id) or node_of(record, node)
        if node is None or records[-1].deleted:
            return None
        if node.status not in ("in_progress", "failed"):
            self._cached.put(node.id, node)
        return node


def node_of(record: TurnRecord, parent: TurnNode | None, scope: str | None = None) -> TurnNode:
    return TurnNode(
        id=record.id,
        owner=record.owner,
        parent=parent,
        messages=record.messages,
        instructions=record.instructions,
        segment=record.segment,
        output_ids=record.output_ids,
        status=record.response["status"],
        generate=record.generate,
        scope=scope,
        conversation_id=record.conversation_id,
        branch=record.branch,
    )


def previous_not_found(response_id: str) -> SessionError:
    return SessionError(
        f"Previous response with id {response_id!r} not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def previous_in_progress(response_id: str) -> SessionError:
    return SessionError(
        f"Response {response_id!r} is still being written. Wait for its end, or cancel it.",
        code="previous_response_in_progress",
        param="previous_response_id",
    )
