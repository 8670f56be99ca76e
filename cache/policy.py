"""Which idle block goes next when room is needed.

Only leaves ever go, so a context is given up from its end and a trunk outlives what grew from it. Among the
leaves a `Policy` decides; it is one function from a leaf to a rank, so that another one is a few lines.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

from cache.errors import OutOfBlocks
from cache.tree import Node

Rank = tuple[int, ...]


class Policy(Protocol):
    """The order in which idle leaves are given up."""

    def rank(self, leaf: Node) -> Rank:
        """The lowest goes first; leaves of equal rank go in the order in which they were offered.

        Asked whenever a leaf becomes idle or something about it changes. It must not change the leaf.
        """
        ...


class LeastRecentlyUsed:
    """What nobody named goes before what a branch points at; within either, what was used longest ago."""

    def rank(self, leaf: Node) -> Rank:
        return (int(bool(leaf.branches)), leaf.last_used)


class IdleLeaves:
    """The leaves that may go, in the order of a policy: a heap. Offering and popping cost O(log n).

    A leaf that is withdrawn stays in the heap as a stale entry: its rank gives it away when it comes up,
    and the heap is rebuilt when more than half of it is stale.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranks: dict[Node, Rank] = {}
        self._heap: list[tuple[Rank, int, Node]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, leaf: Node) -> bool:
        return leaf in self._ranks

    def up_to_date(self, leaf: Node) -> bool:
        """Whether a leaf on offer still has the rank it was offered with."""
        return self._ranks[leaf] == self._policy.rank(leaf)

    def offer(self, leaf: Node) -> None:
        """It may go. Offering it again gives it the rank it has now."""
        rank = self._policy.rank(leaf)
        if self._ranks.get(leaf) == rank:
            return
        self._ranks[leaf] = rank
        self._entries += 1
        heappush(self._heap, (rank, self._entries, leaf))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, entry, leaf) for entry, (leaf, rank) in enumerate(self._ranks.items())]
            heapify(self._heap)

    def withdraw(self, leaf: Node) -> None:
        """It must stay, or has gone. Withdrawing what was not offered is no error."""
        self._ranks.pop(leaf, None)

    def pop(self) -> Node:
        """Withdraw and return the leaf that goes next. Raises `OutOfBlocks` when there is none."""
        while self._heap:
            rank, _, leaf = heappop(self._heap)
            if self._ranks.get(leaf) == rank:
                del self._ranks[leaf]
                return leaf
        raise OutOfBlocks("no idle leaf is left to give up")
