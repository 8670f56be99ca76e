"""The KV cache: which blocks hold which tokens, for running sequences and for idle conversations.

A sequence's life is `open`, then `reserve` and `advance` for every step, then `close`. What it computed stays
in the prefix tree, and the next sequence that begins with the same tokens finds it. Nothing here touches a
tensor: block ids come out, and copies to be made (`take_copies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from cache.branches import BranchInfo, BranchKey, Place
from cache.copies import BlockCopy, CopyQueue, PendingCopy
from cache.errors import BranchRunning
from cache.integrity import check
from cache.policy import LeastRecentlyUsed, Policy
from cache.residency import Residency
from cache.table import Table
from cache.tree import Node
from cache.usage import CacheUsage

MAX_BRANCHES = 65_536


class KVCacheManager:
    """Block tables, branches and the prefix tree they run through.

    num_blocks:   how many blocks there are; a hard limit
    block_size:   tokens in a block
    enable_prefix_caching: False: nothing is ever shared or found again; every table starts empty and leaves
                           nothing
    max_branches: how many names are kept; the one used longest ago is forgotten first, its KV stays as
                  unnamed cache
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
        self._match(table, tokens)
        table.reused = table.kv_len
        if table.key:
            self._running[table.key] += 1
            self._recount(table.key)
        return table

    def _match(self, table: Table, tokens: Sequence[int]) -> None:
        reusable = len(tokens) - 1
        parent: Node = self._resident.tree.root(table.space)
        while table.kv_len < reusable:
            wanted = list(tokens[table.kv_len : min(table.kv_len + self.block_size, reusable)])
            match = self._resident.tree.match(parent, wanted)
            if not match:
                return
            if match.length < self.block_size:
                self._match_partly(table, parent, match.node, wanted[: match.length])
                return
            parent = match.node
            self._resident.enter(parent)
            self._run_through(table, parent, self.block_size)

    def _match_partly(self, table: Table, parent: Node, match: Node, wanted: list[int]) -> None:
        """Begin a block with tokens that are resident: in place if that disturbs nobody, else in a copy."""
        exact = next(
            (node for node in self._resident.tree.equals(parent, wanted) if node.owner is None), None
        )
        if exact:
            self._resident.enter(exact)
            exact.owner = table
            self._run_through(table, exact, len(wanted))
            return
        source = self._copies.origin(match)
        self._resident.pin(source)  # first of all, or making room for the copy might give it up
        if not self.available:
            self._unpin(source)
            return
        target = self._resident.add(parent, wanted, self._resident.take_block())
        target.owner = table
        self._copies.add(PendingCopy(source, target))
        self._run_through(table, target, len(wanted))

    def _run_through(self, table: Table, node: Node, tokens: int) -> None:
        table.path.append(node)
        table.block_ids.append(node.block)
        table.kv_len += tokens

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
        position = 0
        while position < len(tokens):
            filled = table.kv_len % self.block_size
            part = tokens[position : position + self.block_size - filled]
            self._write(table, part)
            position += len(part)

    def _write(self, table: Table, tokens: Sequence[int]) -> None:
        """Add tokens that fit into the tail, or into a new one."""
        tail = table.tail
        if tail:
            self._resident.tree.extend(tail, tokens)
        else:
            parent = table.tip or self._resident.tree.root(table.space)
            tail = self._resident.add(parent, tokens, table.reserved[0])
            tail.owner = table
            table.path.append(tail)
        table.kv_len += len(tokens)
        if len(tail.tokens) == self.block_size:
            self._seal(table, tail)

    def _seal(self, table: Table, tail: Node) -> None:
        """The tail is full: nobody writes it any more.

        If it is resident already, go on along the older block.
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
        duplicate = tail.block
        self._resident.merge(tail, twin)
        self._resident.pool.give_back(duplicate)

    def close(self, table: Table, keep: bool = True) -> None:
        """End a sequence: unpin its path, free what it reserved.

        keep=True:  its branch now points at its end, and what only the branch's old place kept is given up.
                    Without a branch its KV stays as unnamed cache.
        keep=False: as if it had never run: its branch stays where it was, what nobody else points at is given
                    up.

        A table that was never advanced, or whose branch was released meanwhile, is not kept either way.
        """
        self._check_open(table)
        table.closed = True
        del self._tables[table]
        self._give_back_reserved(table)
        self._drop_copy(table)
        keep = keep and table.advanced and not table.released and self.enable_prefix_caching
        if table.key:
            self._running[table.key] -= 1
        tip = table.tip
        if tip:
            end = Place(tip, len(tip.tokens))
            if keep and table.key:
                self._resident.place(table.key, end)
            elif keep:
                self._resident.leave_anonymous(end)
            tip.owner = None
            self._resident.touch(tip)
            for node in table.path:
                self._resident.leave(node)
            self._resident.settle(tip)
        if table.key:
            self._recount(table.key)

    def _give_back_reserved(self, table: Table) -> None:
        for block in table.reserved:
            self._resident.pool.give_back(block)
        del table.block_ids[len(table.path) :]

    def _drop_copy(self, table: Table) -> None:
        """The table's tail will not be used. Nobody else can point at it before its copy was made."""
        copy = self._copies.cancel(table.tail) if table.tail else None
        if copy:
            self._unpin(copy.source)

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make before the next step writes anything.

        Their sources are no longer held after this.
        """
        taken = self._copies.take()
        for copy in taken:
            self._unpin(copy.source)
        self._resident.counters.copied_blocks += len(taken)
        return [copy.order for copy in taken]

    def _unpin(self, node: Node) -> None:
        self._resident.unpin(node)
        self._resident.settle(node)

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

        Copies nothing: whoever goes on from a partly filled block that others point at copies it then. A
                        running
        branch can be forked as far as it has come; onto one, nothing can (`BranchRunning`). Returns what is
        resident of the new branch, which is less than `length` if the old one is shorter, or None, and then
        there is no new branch.
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
