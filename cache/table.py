"""Block tables: where the tokens of one sequence lie."""

from __future__ import annotations

from collections.abc import Hashable

from cache.branches import BranchKey
from cache.tree import Node


class BlockTable:
    """The blocks of one sequence, in order. Token i lies in slot `i % block_size` of block `i // block_size`.

    block_ids: all its blocks, including those reserved for tokens to come
    kv_len:    how many tokens have their keys and values in them
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []
        self.kv_len = 0

    @property
    def room(self) -> int:
        """How many more tokens fit into the blocks it has."""
        return len(self.block_ids) * self.block_size - self.kv_len

    def missing_blocks(self, tokens: int) -> int:
        """How many blocks it lacks for that many more tokens."""
        return max(0, -((self.room - tokens) // self.block_size))

    def slot(self, position: int) -> int:
        """Where the token at a position lies in the pool: `block * block_size + offset`."""
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size


class Table(BlockTable):
    """The block table of a running sequence, made by `KVCacheManager.open`.

    To everyone but the manager it is read-only. `block_ids` only grows at its end while `version` stays the
    same, so a copy of it is brought up to date by appending what is new; when `version` has changed, an
    earlier entry was replaced by a block with the same content, and the copy has to be made again. `reserve`
    appends, `advance` may replace, and nothing else changes either.

    tenant: whose prefix tree it runs in
    branch: the branch that will point at its end when it is closed; None: it leaves its KV unnamed
    reused: how many tokens were found resident when it was opened (`kv_len` at that time)
    path:   the nodes it runs through, first to last; the blocks behind them are reserved
    """

    def __init__(
        self, tenant: str, branch: str | None, block_size: int, space: Hashable, prompt_len: int
    ) -> None:
        super().__init__(block_size)
        self.tenant = tenant
        self.branch = branch
        self.space = space
        self.prompt_len = prompt_len
        self.reused = 0
        self.version = 0
        self.path: list[Node] = []
        self.advanced = False  # whether it has computed anything
        self.released = False  # whether its branch was released while it ran
        self.closed = False

    @property
    def key(self) -> BranchKey | None:
        return None if self.branch is None else BranchKey(self.tenant, self.branch)

    @property
    def tip(self) -> Node | None:
        """The node its last token is in."""
        return self.path[-1] if self.path else None

    @property
    def tail(self) -> Node | None:
        """Its partly filled last node, which only it may write."""
        return self.path[-1] if self.path and self.path[-1].owner is self else None

    @property
    def reserved(self) -> list[int]:
        """The blocks that hold none of its tokens yet."""
        return self.block_ids[len(self.path) :]

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.kv_len} tokens in {self.block_ids}"
        return f"<Table {self.tenant}/{self.branch}: {state}>"
