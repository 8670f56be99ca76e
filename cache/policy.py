"""Which idle block goes next when room is needed.

Only leaves ever go, so a context is given up from its end and a trunk outlives what grew from it. Among the
leaves a `Policy` decides; it is one function from a leaf to a rank, so that another one is a few lines.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

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


class Offer(NamedTuple):
    """A leaf on offer. The number keeps equal ranks in order, and the heap from comparing leaves."""

    rank: Rank
    number: int
    leaf: Node


class IdleLeaves:
    """The leaves that may go, in the order of a policy: a heap. Offering and popping cost O(log n).

    A leaf that is withdrawn, or offered again, leaves a stale entry in the heap. It is skipped when it comes
    up, and the heap is rebuilt when more than half of it is stale.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._offers: dict[Node, Offer] = {}
        self._heap: list[Offer] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, leaf: Node) -> bool:
        return leaf in self._offers

    def up_to_date(self, leaf: Node) -> bool:
        """Whether a leaf on offer still has the rank it was offered with."""
        return self._offers[leaf].rank == self._policy.rank(leaf)

    def offer(self, leaf: Node) -> None:
        """It may go. Offering it again gives it the rank it has now."""
        if leaf in self._offers and self.up_to_date(leaf):
            return
        self._made += 1
        self._offers[leaf] = offer = Offer(self._policy.rank(leaf), self._made, leaf)
        heappush(self._heap, offer)
        if len(self._heap) > 2 * len(self._offers) + 64:
            self._heap = list(self._offers.values())
            heapify(self._heap)

    def withdraw(self, leaf: Node) -> None:
        """It must stay, or has gone. Withdrawing what was not offered is no error."""
        self._offers.pop(leaf, None)

    def pop(self) -> Node:
        """Withdraw and return the leaf that goes next. Raises `OutOfBlocks` when there is none."""
        while self._heap:
            offer = heappop(self._heap)
            if self._offers.get(offer.leaf) is offer:
                del self._offers[offer.leaf]
                return offer.leaf
        raise OutOfBlocks("no idle leaf is left to give up")
