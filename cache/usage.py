"""What the cache holds and what it has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals. Prompts are counted when their first tokens were computed, not when they were looked
    up: a request that finds no room and tries again is one query."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks: `total == free + idle + pinned + reserved`, always.

    free:            hold nothing
    idle:            hold KV that no running table needs; reclaimable
    pinned:          hold KV that a running table, or a copy about to be made, reads
    reserved:        promised to a running table, nothing in them yet
    shared:          of idle and pinned: those that more than one branch or running table runs through. A
                     conversation is one of them, whether it is idle (a branch) or running (a table)
    tokens_resident: tokens whose KV is held, each block's once
    slots_allocated: token slots of all blocks that are not free
    branches:        names
    tables:          running tables
    query_tokens, hit_tokens:       prompt tokens asked for, and found resident
    evicted_blocks, copied_blocks:  blocks given up for want of room, and copied on write
    """

    total: int
    free: int
    idle: int
    pinned: int
    reserved: int
    shared: int
    tokens_resident: int
    slots_allocated: int
    branches: int
    tables: int
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int
    copied_blocks: int

    @property
    def waste(self) -> float:
        """The share of allocated slots that hold no token, from 0 to 1."""
        return 1 - self.tokens_resident / self.slots_allocated if self.slots_allocated else 0.0
