"""The prefix tree: a node is one block and the tokens whose keys and values lie in it.

The path from a root to a node spells a context. Only the last node of a path may be partly filled, so a node
with children is always full. Siblings are kept in the order of their tokens: whatever shares the longest
prefix with a wanted sequence stands next to the place where that sequence would be inserted, so the best
match among ten thousand siblings takes some fourteen comparisons, and a full match is the special case of an
equal neighbour.

The tree knows tokens and structure. Who holds a block and when it may go is `cache.residency`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.branches import Branch
    from cache.table import Table

_tokens_of = attrgetter("tokens")


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """One resident block.

    tokens:    1..block_size token ids whose KV is in the block's first slots (none for a root)
    parent:    the block before it; None for a root and for a node that has left the tree
    block:     its block id
    start:     position of its first token in the context
    children:  in the order of their tokens
    owner:     the one running table that may write the slots behind `tokens`; None: nobody may
    branches:  the branches whose tip is here
    anonymous: how many of its tokens unnamed runs left here as cache
    users:     branches and running tables whose path runs through it
    last_used: logical time
    """

    tokens: list[int]
    parent: Node | None
    block: int
    start: int
    children: list[Node] = field(default_factory=list)
    owner: Table | None = None
    branches: set[Branch] = field(default_factory=set)
    anonymous: int = 0
    users: int = 0
    last_used: int = 0

    @property
    def is_root(self) -> bool:
        return False

    @property
    def attached(self) -> bool:
        """Whether it is part of the tree."""
        return self.parent is not None

    @property
    def claimed(self) -> int:
        """How many of its tokens somebody still points at: the longest of its branches, or an unnamed run."""
        return max(self.anonymous, *(branch.used for branch in self.branches), 0)

    def __repr__(self) -> str:
        return f"<Node: block {self.block}, {len(self.tokens)} tokens from {self.start}>"

    def path(self) -> Iterator[Node]:
        """This node and those before it, last first, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Root(Node):
    """The empty context of one space. Nothing is ever matched or shared across spaces."""

    __slots__ = ("space",)

    def __init__(self, space: Hashable) -> None:
        super().__init__(tokens=[], parent=None, block=-1, start=0)
        self.space = space

    @property
    def is_root(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Match:
    """`length` leading tokens of `node` are the wanted ones; at least 1."""

    node: Node
    length: int


class PrefixTree:
    """All spaces' trees. `size` counts nodes, `tokens` the tokens in them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.size = 0
        self.tokens = 0
        self._roots: dict[Hashable, Root] = {}

    def root(self, space: Hashable) -> Root:
        """The root of a space. It is remembered only while it has children, so idle tenants cost nothing."""
        return self._roots.get(space) or Root(space)

    def match(self, parent: Node, wanted: list[int]) -> Match | None:
        """The child of `parent` that shares the longest prefix with `wanted` (at most a block long), if any
        does."""
        children = parent.children
        place = bisect_right(children, wanted, key=_tokens_of)
        best: Match | None = None
        for child in children[max(place - 1, 0) : place + 1]:
            length = _common_length(child.tokens, wanted)
            if length > (best.length if best else 0):
                best = Match(child, length)
        return best

    def equals(self, parent: Node, tokens: list[int]) -> Iterator[Node]:
        """The children of `parent` with exactly these tokens. Only while tables run can there be several."""
        children = parent.children
        for place in range(bisect_left(children, tokens, key=_tokens_of), len(children)):
            if children[place].tokens != tokens:
                return
            yield children[place]

    def extensions(self, node: Node) -> Iterator[Node]:
        """Siblings whose tokens begin with all of this node's."""
        siblings, length = _siblings(node), len(node.tokens)
        for place in range(bisect_left(siblings, node.tokens, key=_tokens_of), len(siblings)):
            if siblings[place].tokens[:length] != node.tokens:
                return
            if siblings[place] is not node:
                yield siblings[place]

    def prefixes(self, node: Node) -> list[Node]:
        """Siblings whose tokens are fewer than this node's and all at its beginning."""
        parent = node.parent
        if parent is None or len(parent.children) == 1:
            return []
        lengths = range(1, len(node.tokens))
        return [sibling for length in lengths for sibling in self.equals(parent, node.tokens[:length])]

    def add(self, parent: Node, tokens: Sequence[int], block: int) -> Node:
        """A new child of a full node or a root."""
        if isinstance(parent, Root):
            self._roots[parent.space] = parent
        start = 0 if parent.is_root else parent.start + self.block_size
        node = Node(tokens=list(tokens), parent=parent, block=block, start=start)
        insort(parent.children, node, key=_tokens_of)
        self.size += 1
        self.tokens += len(node.tokens)
        return node

    def extend(self, node: Node, tokens: Sequence[int]) -> None:
        """Add tokens at the end of a node without children."""
        self._retoken(node, [*node.tokens, *tokens])

    def shorten(self, node: Node, length: int) -> None:
        """Keep the first `length` tokens of a node without children."""
        self._retoken(node, node.tokens[:length])

    def remove(self, node: Node) -> None:
        """Take a node without children out of the tree."""
        siblings = _siblings(node)
        del siblings[_place(node)]
        if not siblings and isinstance(node.parent, Root):
            del self._roots[node.parent.space]
        node.parent = None
        self.size -= 1
        self.tokens -= len(node.tokens)

    def roots(self) -> list[Root]:
        return list(self._roots.values())

    def __iter__(self) -> Iterator[Node]:
        """Every node, parents before their children."""
        stack: list[Node] = [child for root in self._roots.values() for child in root.children]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def _retoken(self, node: Node, tokens: list[int]) -> None:
        siblings = _siblings(node)
        place = _place(node)
        self.tokens += len(tokens) - len(node.tokens)
        node.tokens = tokens
        if len(siblings) > 1:
            del siblings[place]
            insort(siblings, node, key=_tokens_of)


def _siblings(node: Node) -> list[Node]:
    assert node.parent is not None, "a node outside the tree has no siblings"
    return node.parent.children


def _place(node: Node) -> int:
    """Where a node stands among its siblings.

    Equal tokens stand together: only running tails can be equal.
    """
    siblings = _siblings(node)
    place = bisect_left(siblings, node.tokens, key=_tokens_of)
    while siblings[place] is not node:
        place += 1
    return place


def _common_length(one: list[int], other: list[int]) -> int:
    if one == other:  # the usual case, at the speed of C
        return len(one)
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
