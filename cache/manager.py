"""The KV cache: which blocks hold which tokens, for running sequences and for idle conversations.

A sequence's life is `open`, then `reserve` and `advance` for every step, then `close`. What it computed stays
in the prefix tree, and the next sequence that begins with the same tokens finds it. Nothing here touches a
tensor: block ids come out, and copies to be made (`take_copies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from cache.branches import BranchInfo, BranchKey, Place
from cache.copies import BlockCopy, CopyQueue
from cache.errors import BranchRunning
from cache.growth import Growth
from cache.integrity import check
from cache.policy import LeastRecentlyUsed, Policy
from cache.residency import Residency
from cache.table import Table
from cache.usage import CacheUsage

MAX_BRANCHES = 65_536


class KVCacheManager:
    """Block tables, branches and the prefix tree they run through.

    num_blocks:   how many blocks there are; a hard limit
    block_size:   tokens in a block
    enable_prefix_caching: if False, nothing is shared or found again: tables start empty and leave nothing
    max_branches: how many names are kept; the one used longest ago is forgotten first, its KV stays unnamed
    policy:       which idle blocks go first
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        max_branches: int = MAX_BRANCHES,
        policy: Policy | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._resident = Residency(num_blocks, block_size, policy or LeastRecentlyUsed(), max_branches)
        self._copies = CopyQueue()
        self._growth = Growth(self._resident, self._copies)
        self._tables: dict[Table, None] = {}  # a set that keeps its order
        self._running: Counter[BranchKey] = Counter()

    @property
    def available(self) -> int:
        """Blocks that `reserve` could hand out: free or reclaimable."""
        return self._resident.available

    # A running sequence

    def open(self, tenant: str, tokens: Sequence[int], branch: str | None = None) -> Table:
        """Start a sequence on its longest resident prefix, and pin that.

        At most `len(tokens) - 1` tokens are reused: the last one has to be forwarded to know what follows it.
        Never fails for want of room; it may give up one idle block for a partly matching one. `branch` is
        left where it is until the table is closed. Raises `ValueError` if there are no tokens.
        """
        if not tokens:
            raise ValueError("tokens must hold at least one token")
        # Without prefix caching every table gets a space of its own, where there is nothing to find.
        space: Hashable = tenant if self.enable_prefix_caching else object()
        table = Table(tenant, branch, self.block_size, space, len(tokens))
        self._tables[table] = None
        self._growth.match(table, tokens)
        table.reused = table.kv_len
        if table.key:
            self._running[table.key] += 1
            self._recount(table.key)
        return table

    def reserve(self, table: Table, tokens: int) -> bool:
        """Make sure that there are blocks for that many more tokens, giving up idle ones if need be.

        False: there is no room, and nothing was changed.
        """
        self._check_open(table)
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        missing = table.missing_blocks(tokens)
        if missing > self.available:
            return False
        table.block_ids.extend(self._resident.take_block() for _ in range(missing))
        return True

    def advance(self, table: Table, tokens: Sequence[int]) -> None:
        """These tokens were forwarded: their KV is in the table's next slots.

        Raises `ValueError` if there is no room reserved for them, and `RuntimeError` if the table's tail
        still waits for its copy.
        """
        self._check_open(table)
        if len(tokens) > table.room:
            raise ValueError(f"tokens must fit into the {table.room} reserved slots, got {len(tokens)}")
        if table.tail in self._copies:
            raise RuntimeError("the copies of take_copies() must be made before the table is advanced")
        if tokens and not table.advanced:
            table.advanced = True
            self._resident.counters.query_tokens += table.prompt_len
            self._resident.counters.hit_tokens += table.reused
        self._growth.write(table, tokens)

    def close(self, table: Table, keep: bool = True) -> None:
        """End a sequence: unpin its path, free what it reserved.

        keep=True:  its branch now points at its end, and what only the branch's old place kept is given up.
                    Without a branch its KV stays as unnamed cache.
        keep=False: as if it had never run: its branch stays where it was, and what nobody points at is given
                    up.

        A table that was never advanced, or whose branch was released meanwhile, is not kept either way.
        """
        self._check_open(table)
        table.closed = True
        del self._tables[table]
        keep = keep and table.advanced and not table.released and self.enable_prefix_caching
        if table.key:
            self._running[table.key] -= 1
        if table.tip and keep:
            self._keep(table, Place(table.tip, len(table.tip.tokens)))
        self._growth.leave(table)
        if table.key:
            self._recount(table.key)

    def _keep(self, table: Table, end: Place) -> None:
        if table.key:
            self._resident.place(table.key, end)
        else:
            self._resident.leave_anonymous(end)

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make before the next step writes anything.

        Their sources are no longer held after this.
        """
        taken = self._copies.take()
        for copy in taken:
            self._resident.unpin(copy.source)
        self._resident.counters.copied_blocks += len(taken)
        return [copy.order for copy in taken]

    # Branches

    def branch(self, tenant: str, name: str) -> BranchInfo | None:
        """What is resident of a branch; of a running one, what its table has.

        None: nothing, or no such branch.
        """
        key = BranchKey(tenant, name)
        place = self._locate(key)
        if not place:
            return None
        blocks = -(-place.length // self.block_size)
        return BranchInfo(tenant, name, place.length, blocks, running=key in self._running)

    def release(self, tenant: str, branch: str) -> None:
        """Forget a branch.

        Blocks that nothing else points to are free at once; a running table's when it is closed.
        """
        key = BranchKey(tenant, branch)
        known = self._resident.branches.get(key)
        if known:
            self._resident.forget(known)
        for table in self._tables:
            if table.key == key:
                table.released = True

    def truncate(self, tenant: str, branch: str, length: int) -> BranchInfo | None:
        """Let a branch end after its first `length` tokens, and give up the dead tail at once.

        A branch that is no longer than that is left alone. Returns what is resident of it now. Raises
        `BranchRunning` while a table of its name is open.
        """
        _check_length(length)
        key = BranchKey(tenant, branch)
        self._check_idle(key)
        known = self._resident.branches.get(key)
        if known and length == 0:
            self._resident.forget(known)
        elif known and length < known.place.length:
            self._place(key, known.place.back_to(length))
        return self.branch(tenant, branch)

    def fork(self, tenant: str, branch: str, new_branch: str, length: int | None = None) -> BranchInfo | None:
        """Let `new_branch` point at the first `length` tokens of `branch`: all that is resident by default.

        Copies nothing: whoever goes on from a partly filled block in another way copies it then. A running
        branch can be forked as far as it has come. Returns what is resident of the new branch, which is less
        than `length` if the old one is shorter, or None, and then there is no new branch. Raises
        `BranchRunning` if a table of the new name is open.
        """
        if new_branch == branch:
            raise ValueError(f"new_branch must differ from branch, got {branch!r} twice")
        if length is not None:
            _check_length(length)
        new_key = BranchKey(tenant, new_branch)
        self._check_idle(new_key)
        place = self._locate(BranchKey(tenant, branch))
        if not place or length == 0:
            return None
        if length is not None and length < place.length:
            place = place.back_to(length)
        self._place(new_key, place)
        return self.branch(tenant, new_branch)

    def _place(self, key: BranchKey, place: Place) -> None:
        self._resident.touch(place.node)
        self._resident.place(key, place)
        self._recount(key)

    def _locate(self, key: BranchKey) -> Place | None:
        """Where a conversation is: at the end of its table while that runs, else where its branch points."""
        if key not in self._running:
            known = self._resident.branches.get(key)
            return known.place if known else None
        table = next(table for table in reversed(self._tables) if table.key == key)
        resident = [node for node in table.path[-2:] if node not in self._copies]
        return Place(resident[-1], len(resident[-1].tokens)) if resident else None

    def _recount(self, key: BranchKey) -> None:
        """A conversation is one user of its path: its table while that runs, else its branch."""
        if not self._running[key]:
            del self._running[key]
        branch = self._resident.branches.get(key)
        if branch and key in self._running:
            self._resident.discount(branch)
        elif branch:
            self._resident.count(branch)

    # The books

    @property
    def usage(self) -> CacheUsage:
        """How much is held, by whom, and what was reused so far. O(running tables)."""
        resident = self._resident
        free, idle = resident.pool.free, resident.idle
        reserved = sum(len(table.block_ids) - len(table.path) for table in self._tables)
        return CacheUsage(
            total=resident.pool.total,
            free=free,
            idle=idle,
            pinned=resident.pool.total - free - idle - reserved,
            reserved=reserved,
            shared=resident.shared,
            tokens_resident=resident.tree.tokens,
            slots_allocated=(resident.pool.total - free) * self.block_size,
            branches=len(resident.branches),
            tables=len(self._tables),
            query_tokens=resident.counters.query_tokens,
            hit_tokens=resident.counters.hit_tokens,
            evicted_blocks=resident.counters.evicted_blocks,
            copied_blocks=resident.counters.copied_blocks,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if any of the books contradicts another.

        Walks everything: for tests and idle times.
        """
        check(self._resident, list(self._tables), self._copies, self._running)

    def _check_open(self, table: Table) -> None:
        if table not in self._tables:
            raise ValueError(f"table must be an open one of this manager, got {table!r}")

    def _check_idle(self, key: BranchKey) -> None:
        if key in self._running:
            raise BranchRunning(f"branch {key.name!r} is running, and its table decides where it will point")


def _check_length(length: int) -> None:
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
