"""Copies of blocks that wait to be made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cache.tree import Node


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block `source` to block `target`, all layers, before anything else is written.

    Only the first `tokens` slots matter; copying the whole block is as right and usually as fast. The copies
    of one batch never read what another of them writes, so they may run in any order or all at once.
    """

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy whose source is held by a reference until it is taken."""

    source: Node
    target: Node

    @property
    def order(self) -> BlockCopy:
        return BlockCopy(self.source.block, self.target.block, len(self.target.tokens))


class CopyQueue:
    """The copies to run before the next step, by their target."""

    def __init__(self) -> None:
        self._pending: dict[Node, PendingCopy] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingCopy]:
        return iter(self._pending.values())

    def __contains__(self, target: Node | None) -> bool:
        """Whether a node still waits for its content."""
        return target in self._pending

    def origin(self, node: Node) -> Node:
        """Where a node's content is now: in itself, or, while it waits for its copy, in that copy's
        source."""
        pending = self._pending.get(node)
        return pending.source if pending else node

    def add(self, copy: PendingCopy) -> None:
        self._pending[copy.target] = copy

    def cancel(self, target: Node) -> PendingCopy | None:
        return self._pending.pop(target, None)

    def take(self) -> list[PendingCopy]:
        taken = list(self._pending.values())
        self._pending.clear()
        return taken
