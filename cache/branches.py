"""Branches: names for a place in the tree, one a conversation.

A branch is all that an idle conversation is: a node and how many of its tokens count. It holds nothing. When
its node is reclaimed it slides back to the node before, and with the last of them it is forgotten; whoever
knows the token ids can always compute the rest again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cache.tree import Node


class BranchKey(NamedTuple):
    """A tenant's own name for a branch."""

    tenant: str
    name: str


class Place(NamedTuple):
    """The context up to and including the first `used` tokens of `node`."""

    node: Node
    used: int

    @property
    def length(self) -> int:
        """Tokens of that context."""
        return self.node.start + self.used

    def back_to(self, length: int) -> Place:
        """The place on the same path after the first `length` tokens; 1 <= length <= self.length."""
        node = next(node for node in self.node.path() if node.start < length)
        return Place(node, length - node.start)


@dataclass(eq=False, slots=True)
class Branch:
    """A named place: the first `used` tokens of `node` are its last.

    counted: whether it is among the `users` of its path. It is not while a table of its name runs: that table
             then stands for the conversation, and the branch only remembers where to return to if the run is
             dropped.
    """

    key: BranchKey
    node: Node
    used: int
    counted: bool = False

    @property
    def place(self) -> Place:
        return Place(self.node, self.used)


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """What is resident of a branch: `length` tokens in `blocks` blocks.

    `running`: a table of its name is open.
    """

    tenant: str
    name: str
    length: int
    blocks: int
    running: bool


class Branches:
    """All names, least recently used first, and at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_branches must be at least 1, got {limit}")
        self.limit = limit
        self._branches: OrderedDict[BranchKey, Branch] = OrderedDict()

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches.values())

    def get(self, key: BranchKey) -> Branch | None:
        return self._branches.get(key)

    def put(self, branch: Branch) -> None:
        """Remember it as the most recently used of all."""
        self._branches[branch.key] = branch
        self._branches.move_to_end(branch.key)

    def forget(self, branch: Branch) -> None:
        del self._branches[branch.key]

    def surplus(self) -> Branch | None:
        """The branch that has to be forgotten for the limit's sake, if any."""
        return next(iter(self._branches.values())) if len(self._branches) > self.limit else None
