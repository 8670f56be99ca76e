"""A cache with a memory behind it that remembers what was written where."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from cache.branches import BranchKey
from cache.manager import KVCacheManager
from cache.table import Table
from cache.tree import Node

Tag = tuple[Hashable, ...]
POISON: Tag = ("poison",)


def tag(space: Hashable, context: Sequence[int]) -> Tag:
    """What the KV of a context's last token stands for: a token's KV depends on everything before it."""
    return (space, *context)


class SimulatedCache:
    """A manager, and an array of slots in which the tags of tokens take the place of keys and values.

    Free blocks are poisoned, writes go where the block table says, copies are made all at once.
    """

    def __init__(self, num_blocks: int, block_size: int, **settings: object) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, **settings)  # type: ignore[arg-type]
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]

    def open(self, tenant: str, tokens: Sequence[int], branch: str | None = None) -> Table:
        return self.manager.open(tenant, tokens, branch)

    def copy(self) -> None:
        """Make the waiting copies. All sources are read before any target is written."""
        copies = self.manager.take_copies()
        contents = [self.memory[copy.source][: copy.tokens] for copy in copies]
        for copy, content in zip(copies, contents, strict=True):
            self.memory[copy.target] = content + [POISON] * (self.manager.block_size - copy.tokens)

    def forward(self, table: Table, context: Sequence[int]) -> bool:
        """Compute the KV of what of `context` the table lacks. False if there is no room for it."""
        new = list(context[table.kv_len :])
        if not self.manager.reserve(table, len(new)):
            return False
        self.poison_free()
        self.copy()
        for position in range(table.kv_len, len(context)):
            block, offset = divmod(table.slot(position), self.manager.block_size)
            self.memory[block][offset] = tag(table.space, context[: position + 1])
        self.manager.advance(table, new)
        return True

    def turn(
        self, tenant: str, context: Sequence[int], branch: str | None = None, keep: bool = True
    ) -> Table:
        """Open, compute all of `context`, close."""
        table = self.open(tenant, context, branch)
        assert self.forward(table, context), "the pool is too small for this"
        self.manager.close(table, keep)
        return table

    def poison_free(self) -> None:
        for block, slots in enumerate(self.memory):
            if not self.manager._resident.pool.refs(block):
                slots[:] = [POISON] * len(slots)

    def check_table(self, table: Table, context: Sequence[int]) -> None:
        """The table's slots read back exactly this context (but for a tail that waits for its copy)."""
        assert table.kv_len == len(context)
        size = self.manager.block_size
        ready = table.kv_len - (len(table.tail.tokens) if table.tail in self.manager._copies else 0)  # type: ignore[union-attr]
        for position in range(ready):
            block, offset = divmod(table.slot(position), size)
            assert self.memory[block][offset] == tag(table.space, context[: position + 1])

    def branch_path(self, tenant: str, name: str) -> list[Node]:
        branch = self.manager._resident.branches.get(BranchKey(tenant, name))
        return list(branch.node.path())[::-1] if branch else []

    def branch_tokens(self, tenant: str, name: str) -> list[int]:
        """The tokens an idle branch spells; its memory is checked on the way."""
        branch = self.manager._resident.branches.get(BranchKey(tenant, name))
        path = self.branch_path(tenant, name)
        tokens = [token for node in path for token in node.tokens]
        if branch:
            tokens = tokens[: branch.place.length]
        for position in range(len(tokens)):
            node = path[position // self.manager.block_size]
            slot = self.memory[node.block][position % self.manager.block_size]
            assert slot == tag(tenant, tokens[: position + 1])
        return tokens

    def check(self) -> None:
        """The books are right, and every resident token's KV is what it should be."""
        self.poison_free()
        self.manager.check_integrity()
        for node in self.manager._resident.tree:
            if node in self.manager._copies:
                continue
            path = list(node.path())[::-1]
            parent = path[0].parent
            context = [token for step in path for token in step.tokens]
            for offset in range(len(node.tokens)):
                expected = tag(parent.space, context[: node.start + offset + 1])  # type: ignore[union-attr]
                assert self.memory[node.block][offset] == expected

    def longest_resident(self, tenant: str, tokens: Sequence[int]) -> int:
        """How many of these tokens have their KV somewhere, by looking at every node."""
        longest = 0
        for node in self.manager._resident.tree:
            path = list(node.path())[::-1]
            if path[0].parent.space != tenant:  # type: ignore[union-attr]
                continue
            context = [token for step in path for token in step.tokens]
            common = 0
            while common < min(len(context), len(tokens)) and context[common] == tokens[common]:
                common += 1
            longest = max(longest, common)
        return longest
