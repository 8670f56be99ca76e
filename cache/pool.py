"""Block ids: which are free, and how many hold each of the others."""

from __future__ import annotations

from cache.errors import OutOfBlocks, require


class BlockPool:
    """A free list and a reference count for each block. Ids run from 0 to `total - 1`.

    Whoever takes a block holds one reference; `share` adds one, `give_back` drops one, and the block is free
    again when none is left. Every verb is O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is warm in the caches

    @property
    def total(self) -> int:
        return len(self._refs)

    @property
    def free(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        """How many hold the block; 0: it is free."""
        return self._refs[block]

    def take(self) -> int:
        """A free block, held once. Raises `OutOfBlocks` when there is none."""
        if not self._free:
            raise OutOfBlocks(f"all {self.total} blocks are in use")
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more holds the block. Returns how many do now. Raises `ValueError` for a free block."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._refs[block] += 1
        return self._refs[block]

    def give_back(self, block: int) -> int:
        """One less holds the block.

        Returns how many still do. Raises `ValueError` for a block that is free already.
        """
        if not self._refs[block]:
            raise ValueError(f"block {block} is free already")
        self._refs[block] -= 1
        if not self._refs[block]:
            self._free.append(block)
        return self._refs[block]

    def check_integrity(self) -> None:
        free = set(self._free)
        require(len(free) == len(self._free), "a block is on the free list twice")
        for block, refs in enumerate(self._refs):
            require(refs >= 0, f"block {block} is held {refs} times")
            require(
                (refs == 0) == (block in free), f"block {block} is held {refs} times and free={block in free}"
            )
