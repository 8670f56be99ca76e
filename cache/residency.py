"""What is resident, who keeps it there, and how it goes.

Three things are counted, and everything else follows from them:

- A block's *references* (in the pool): one for the tree that holds it, one for each running table whose path
  runs through it, one for each copy about to read it. A node with the tree's reference alone is idle.
- A node's *claims*: branches whose tip it is, and what an unnamed run left. They bias what goes first; they
  never hold a block.
- A node's *users*: the branches and running tables whose path runs through it. They are for the books only.

A running table references its whole path, so below an idle node everything is idle, and giving up leaves
brings every idle block in the end: what is available is simply free + idle. A leaf comes to rest in `settle`,
which gives up what nobody points at. So an idle leaf holds exactly the tokens that somebody claims.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.branches import Branch, Branches, BranchKey, Place
from cache.policy import IdleLeaves, Policy
from cache.pool import BlockPool
from cache.tree import Node, PrefixTree
from cache.usage import Counters


class Residency:
    """The pool, the tree and the branches, and the transitions that keep them in step."""

    def __init__(self, num_blocks: int, block_size: int, policy: Policy, max_branches: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size)
        self.branches = Branches(max_branches)
        self.leaves = IdleLeaves(policy)
        self.counters = Counters()
        self.idle = 0
        self.shared = 0
        self._clock = 0

    @property
    def available(self) -> int:
        return self.pool.free + self.idle

    def is_idle(self, node: Node) -> bool:
        """Whether the tree alone holds it."""
        return node.attached and self.pool.refs(node.block) == 1

    def is_idle_leaf(self, node: Node) -> bool:
        return not node.children and self.is_idle(node)

    # Blocks

    def take_block(self) -> int:
        """A block, held once.

        Gives up the next idle leaf if none is free. Raises `OutOfBlocks` if none is idle either.
        """
        if not self.pool.free:
            self._evict(self.leaves.pop())
        return self.pool.take()

    def _evict(self, leaf: Node) -> None:
        """Give up a leaf. What pointed at it slides back to its parent."""
        parent = leaf.parent
        assert parent is not None
        for branch in list(leaf.branches):
            if parent.is_root:
                self.branches.forget(branch)
            else:
                self._point(branch, parent, self.tree.block_size)
        if leaf.anonymous and not parent.is_root:
            parent.anonymous = self.tree.block_size
        self._remove(leaf)
        self.counters.evicted_blocks += 1
        if not parent.is_root and self.is_idle_leaf(parent):
            self.leaves.offer(parent)

    # Nodes

    def add(self, parent: Node, tokens: Sequence[int], block: int) -> Node:
        """A node for a block that a table holds.

        The table's reference passes to the tree, and the table enters the node.
        """
        node = self.tree.add(parent, tokens, block)
        self.pool.share(block)
        self._use(node, +1)
        return node

    def enter(self, node: Node) -> None:
        """A table runs through a node."""
        self.pin(node)
        self._use(node, +1)

    def leave(self, node: Node) -> None:
        """Undo `enter`."""
        self._use(node, -1)
        self.unpin(node)

    def pin(self, node: Node) -> None:
        """Hold a node's block: what is in it stays."""
        if self.pool.share(node.block) == 2 and node.attached:
            self.idle -= 1
            self.leaves.withdraw(node)

    def unpin(self, node: Node) -> None:
        """Undo `pin`. A leaf that is idle now comes to rest."""
        if self.pool.give_back(node.block) == 1 and node.attached:
            self.idle += 1
            self.settle(node)

    def settle(self, node: Node) -> None:
        """Bring an idle leaf to rest: tokens nobody claims are given up, if need be further up too.

        Anything but an idle leaf is left as it is, so it may be called on any node.
        """
        while not node.is_root and self.is_idle_leaf(node):
            claimed = node.claimed
            if claimed:
                self._rest(node, claimed)
                return
            parent = node.parent
            assert parent is not None
            self._remove(node)
            node = parent

    def _rest(self, leaf: Node, claimed: int) -> None:
        if claimed < len(leaf.tokens):
            self.tree.shorten(leaf, claimed)
        twin = next((sibling for sibling in self.tree.extensions(leaf) if sibling.owner is None), None)
        if twin:
            self.merge(leaf, twin)
        else:
            self.absorb(leaf)
            self.leaves.offer(leaf)

    def absorb(self, node: Node) -> None:
        """Drop the idle siblings that hold nothing but a beginning of this node's tokens."""
        for sibling in self.tree.prefixes(node):
            if self.is_idle(sibling):
                self.merge(sibling, node)

    def merge(self, leaf: Node, into: Node) -> None:
        """Drop a leaf whose tokens a sibling's begin with.

        Everything that points at it points at the sibling.
        """
        for branch in list(leaf.branches):
            self._point(branch, into, branch.used)
        into.anonymous = max(into.anonymous, leaf.anonymous)
        into.last_used = max(into.last_used, leaf.last_used)
        self._use(into, leaf.users)
        self._remove(leaf)
        self._reoffer(into)

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree and give back the tree's reference to its block."""
        if self.is_idle(node):
            self.idle -= 1
            self.leaves.withdraw(node)
        self._use(node, -node.users)
        self.tree.remove(node)
        self.pool.give_back(node.block)

    def _reoffer(self, node: Node) -> None:
        """Its rank may have changed."""
        if node in self.leaves:
            self.leaves.offer(node)

    # Branches

    def place(self, key: BranchKey, place: Place) -> None:
        """Let a branch point at a place; it is made if need be.

        What only it pointed at before is given up. It is not among the users of its path yet: see `count`.
        """
        branch = self.branches.get(key)
        if branch:
            self.discount(branch)
            left = branch.node
            self._point(branch, place.node, place.used)
            self.settle(left)
        else:
            branch = Branch(key, place.node, place.used)
            place.node.branches.add(branch)
        self.branches.put(branch)
        surplus = self.branches.surplus()
        if surplus:
            self.leave_anonymous(surplus.place)
            self.forget(surplus)

    def forget(self, branch: Branch) -> None:
        """Drop a name, and give up what nothing else points at."""
        self.discount(branch)
        self.branches.forget(branch)
        branch.node.branches.discard(branch)
        self.settle(branch.node)

    def count(self, branch: Branch) -> None:
        """Let a branch be one of its path's users."""
        if not branch.counted:
            branch.counted = True
            self._use_path(branch.node, +1)

    def discount(self, branch: Branch) -> None:
        if branch.counted:
            branch.counted = False
            self._use_path(branch.node, -1)

    def leave_anonymous(self, place: Place) -> None:
        """Keep what lies up to a place as cache that has no name."""
        place.node.anonymous = max(place.node.anonymous, place.used)

    def touch(self, node: Node) -> None:
        """Note that a path was used just now."""
        self._clock += 1
        for step in node.path():
            step.last_used = self._clock
        self._reoffer(node)

    def _use_path(self, tip: Node, change: int) -> None:
        for node in tip.path():
            self._use(node, change)

    def _use(self, node: Node, change: int) -> None:
        was_shared = node.users > 1
        node.users += change
        self.shared += (node.users > 1) - was_shared

    def _point(self, branch: Branch, node: Node, used: int) -> None:
        branch.node.branches.discard(branch)
        branch.node, branch.used = node, used
        node.branches.add(branch)
