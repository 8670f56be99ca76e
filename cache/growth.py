"""How a table's path grows through the tree: over what is resident, then over what it computes itself."""

from __future__ import annotations

from collections.abc import Sequence

from cache.copies import CopyQueue, PendingCopy
from cache.residency import Residency
from cache.table import Table
from cache.tree import Node


class Growth:
    """Moves tables along the tree. A block is written only by the one table that owns it as its tail."""

    def __init__(self, resident: Residency, copies: CopyQueue) -> None:
        self._resident = resident
        self._copies = copies
        self._block_size = resident.tree.block_size

    def match(self, table: Table, tokens: Sequence[int]) -> None:
        """Run through as many of these tokens as are resident, except the last one."""
        reusable = len(tokens) - 1
        parent: Node = self._resident.tree.root(table.space)
        while table.kv_len < reusable:
            wanted = list(tokens[table.kv_len : min(table.kv_len + self._block_size, reusable)])
            match = self._resident.tree.match(parent, wanted)
            if not match:
                return
            if match.length < self._block_size:
                self._match_partly(table, parent, match.node, wanted[: match.length])
                return
            parent = match.node
            self._resident.enter(parent)
            _run_through(table, parent)

    def _match_partly(self, table: Table, parent: Node, match: Node, wanted: list[int]) -> None:
        """Begin a block with tokens that are resident: in place if that disturbs nobody, else in a copy."""
        equals = self._resident.tree.equals(parent, wanted)
        tail = next((node for node in equals if node.owner is None), None)
        if tail:
            self._resident.enter(tail)
        else:
            tail = self._copy(table, parent, match, wanted)
        if tail:
            tail.owner = table
            _run_through(table, tail)

    def _copy(self, table: Table, parent: Node, match: Node, wanted: list[int]) -> Node | None:
        """Copy on write: a new node for the tokens that a sibling begins with.

        None: there is no room for it. The source is held until the copy is made, and that must not cost the
        prompt a block it could have had.
        """
        source = self._copies.origin(match)
        self._resident.pin(source)  # first of all, or making room for the copy might give it up
        if self._resident.available < -(-table.prompt_len // self._block_size) - len(table.path):
            self._resident.unpin(source)
            return None
        target = self._resident.add(parent, wanted, self._resident.take_block())
        self._copies.add(PendingCopy(source, target))
        return target

    def write(self, table: Table, tokens: Sequence[int]) -> None:
        """Add tokens whose KV is in the table's next slots."""
        position = 0
        while position < len(tokens):
            room = self._block_size - table.kv_len % self._block_size
            part = tokens[position : position + room]
            tail = self._extend(table, part)
            table.kv_len += len(part)
            position += len(part)
            if len(part) == room:
                self._seal(table, tail)

    def _extend(self, table: Table, tokens: Sequence[int]) -> Node:
        """Add tokens that fit into the tail, or into a new one."""
        tail = table.tail
        if tail:
            self._resident.tree.extend(tail, tokens)
            return tail
        parent = table.tip or self._resident.tree.root(table.space)
        tail = self._resident.add(parent, tokens, table.block_ids[len(table.path)])
        tail.owner = table
        table.path.append(tail)
        return tail

    def _seal(self, table: Table, tail: Node) -> None:
        """The tail is full: nobody writes it any more.

        If it is resident already, the older block takes its place.
        """
        tail.owner = None
        twin = next(self._resident.tree.extensions(tail), None)
        if not twin:
            self._resident.absorb(tail)
            return
        self._resident.pin(twin)
        table.path[-1] = twin
        table.block_ids[len(table.path) - 1] = twin.block
        table.version += 1
        self._resident.merge(tail, twin)
        self._resident.unpin(tail)

    def leave(self, table: Table) -> None:
        """The table runs no more: let go of its path and of what it reserved."""
        for block in table.reserved:
            self._resident.pool.give_back(block)
        del table.block_ids[len(table.path) :]
        tip = table.tip
        if not tip:
            return
        copy = self._copies.cancel(tip)
        if copy:  # nothing points at a block before its copy was made, so the target will be given up
            self._resident.unpin(copy.source)
        tip.owner = None
        self._resident.touch(tip)
        for node in table.path:
            self._resident.leave(node)


def _run_through(table: Table, node: Node) -> None:
    table.path.append(node)
    table.block_ids.append(node.block)
    table.kv_len += len(node.tokens)
