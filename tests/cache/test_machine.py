"""A state machine drives the cache through all a server may do, against a plain model of what must hold."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.errors import BranchRunning
from cache.table import Table
from tests.cache.simulation import SimulatedCache

TENANTS = st.sampled_from(["ann", "bob"])
NAMES = st.sampled_from(["one", "two", "three", "four"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens only: prefixes collide all the time
PICK = st.integers(0, 1_000)


@dataclass
class Running:
    """A sequence as its user sees it: what it was asked to compute, and what of that its table has."""

    table: Table
    prompt: list[int]
    done: list[int]
    released: bool = False


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []
        self.branches: dict[
            tuple[str, str], list[int]
        ] = {}  # what each would be if nothing were ever reclaimed

    @initialize(
        blocks=st.integers(1, 16),
        size=st.sampled_from([1, 2, 4, 4, 8]),
        max_branches=st.integers(1, 6),
    )
    def start(self, blocks: int, size: int, max_branches: int) -> None:
        self.cache = SimulatedCache(blocks, size, max_branches=max_branches)
        self.manager = self.cache.manager

    def pick(self, number: int) -> Running:
        return self.running[number % len(self.running)]

    def is_running(self, tenant: str, name: str | None) -> bool:
        return any(run.table.tenant == tenant and run.table.branch == name for run in self.running)

    # Rules

    @rule(
        tenant=TENANTS, name=st.none() | NAMES, suffix=TOKENS, base=st.none() | PICK, cut=st.integers(0, 30)
    )
    def open(
        self,
        tenant: str,
        name: str | None,
        suffix: list[int],
        base: int | None,
        cut: int,
        start: list[int] | None = None,
    ) -> None:
        known = [*self.branches.values(), *(run.prompt for run in self.running)]
        if start is None:
            start = known[base % len(known)][:cut] if known and base is not None else []
        prompt = (start + suffix)[:24]
        reusable = min(self.cache.longest_resident(tenant, prompt), len(prompt) - 1)
        table = self.cache.open(tenant, prompt, name)
        size = self.manager.block_size
        assert table.reused == table.kv_len <= reusable
        if table.reused < reusable:
            missing = -(-len(prompt) // size) - len(table.path)
            assert self.manager.available <= missing, "there was room for a copy"
            assert table.reused == reusable // size * size
        self.running.append(Running(table, prompt, prompt[: table.kv_len]))

    @precondition(lambda self: self.running)
    @rule(which=PICK, tokens=st.integers(0, 30))
    def reserve(self, which: int, tokens: int) -> None:
        table = self.pick(which).table
        before = (self.manager.usage, list(table.block_ids))
        available = self.manager.available
        missing = table.missing_blocks(tokens)
        if self.manager.reserve(table, tokens):
            assert table.room >= tokens
            assert self.manager.available == available - missing
        else:
            assert missing > available
            assert (self.manager.usage, table.block_ids) == before

    @precondition(lambda self: self.running)
    @rule(which=PICK, count=st.integers(1, 9), sampled=TOKENS)
    def forward(self, which: int, count: int, sampled: list[int]) -> None:
        run = self.pick(which)
        table = run.table
        old, version = list(table.block_ids), table.version
        context = (run.prompt if table.kv_len < len(run.prompt) else run.done + sampled)[
            : table.kv_len + count
        ]
        if self.cache.forward(table, context):
            run.done = context
            if table.version == version:
                assert table.block_ids[: len(old)] == old, "entries changed without a new version"

    @rule(tenant=TENANTS, name=st.none() | NAMES, suffix=TOKENS, base=PICK, cut=st.integers(0, 30))
    def whole_turn(self, tenant: str, name: str | None, suffix: list[int], base: int, cut: int) -> None:
        self.open(tenant, name, suffix, base, cut)
        run = self.running[-1]
        if self.cache.forward(run.table, run.prompt):
            run.done = run.prompt
        else:
            fits = -(-len(run.prompt) // self.manager.block_size) <= self.manager.usage.total
            assert len(self.running) > 1 or not fits, "what fits the pool fits when nothing else runs"
        self.close(len(self.running) - 1, keep=True)

    @precondition(lambda self: self.running)
    @rule(which=PICK, suffix=TOKENS)
    def open_beside(self, which: int, suffix: list[int]) -> None:
        """Another answer to what is running already."""
        run = self.pick(which)
        self.open(run.table.tenant, None, suffix, None, 0, start=run.done)

    @precondition(lambda self: self.manager._copies)
    @rule()
    def copy(self) -> None:
        self.cache.copy()

    @precondition(lambda self: self.running)
    @rule(which=PICK, keep=st.booleans())
    def close(self, which: int, keep: bool) -> None:
        run = self.running.pop(which % len(self.running))
        table = run.table
        self.manager.close(table, keep)
        kept = keep and table.advanced and not run.released
        if kept and table.branch:
            self.branches[table.tenant, table.branch] = run.done
            if not self.is_running(table.tenant, table.branch):
                info = self.manager.branch(table.tenant, table.branch)
                assert info is not None
                assert info.length == len(run.done)
        elif table.branch and run.released and (table.tenant, table.branch) not in self.branches:
            assert self.is_running(table.tenant, table.branch) or not self.manager.branch(
                table.tenant, table.branch
            )

    @rule(tenant=TENANTS, name=NAMES)
    def release(self, tenant: str, name: str) -> None:
        self.manager.release(tenant, name)
        self.branches.pop((tenant, name), None)
        for run in self.running:
            run.released |= (run.table.tenant, run.table.branch) == (tenant, name)
        if not self.is_running(tenant, name):
            assert self.manager.branch(tenant, name) is None

    @rule(tenant=TENANTS, name=NAMES, length=st.integers(0, 24))
    def truncate(self, tenant: str, name: str, length: int) -> None:
        try:
            info = self.manager.truncate(tenant, name, length)
        except BranchRunning:
            assert self.is_running(tenant, name)
            return
        assert not self.is_running(tenant, name)
        assert info is None or info.length <= length
        if (tenant, name) in self.branches:
            self.branches[tenant, name] = self.branches[tenant, name][:length]

    @rule(tenant=TENANTS, name=NAMES, new=NAMES, length=st.none() | st.integers(0, 24))
    def fork(self, tenant: str, name: str, new: str, length: int | None) -> None:
        if name == new:
            return
        source = self.manager.branch(tenant, name)
        runs = [run for run in self.running if (run.table.tenant, run.table.branch) == (tenant, name)]
        tokens = runs[-1].done if runs else self.branches.get((tenant, name), [])
        free, copied = self.manager.usage.free, self.manager.usage.copied_blocks
        had = self.manager.branch(tenant, new)
        try:
            info = self.manager.fork(tenant, name, new, length)
        except BranchRunning:
            assert self.is_running(tenant, new)
            return
        if info is None:
            assert source is None or length == 0
            return
        assert source is not None
        self.branches[tenant, new] = tokens[: min(source.length, source.length if length is None else length)]
        assert info.length == len(self.branches[tenant, new])
        assert self.manager.usage.copied_blocks == copied
        assert self.manager.usage.free == free or had, "a fork costs nothing until somebody writes"

    # What must hold after each

    @invariant()
    def everything_reads_back(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for run in self.running:
            self.cache.check_table(run.table, run.done)
        for (tenant, name), tokens in self.branches.items():
            resident = self.cache.branch_tokens(tenant, name)
            assert resident == tokens[: len(resident)]
        usage = self.manager.usage
        assert usage.total == usage.free + usage.idle + usage.pinned + usage.reserved
        assert 0 <= usage.waste < 1 or usage.reserved

    def teardown(self) -> None:
        """Whatever happened: afterwards every block can be had."""
        if not hasattr(self, "cache"):
            return
        for run in self.running:
            self.manager.close(run.table)
        table = self.cache.open("cid", [0])
        assert self.manager.reserve(table, self.manager.usage.total * self.manager.block_size)
        self.manager.close(table)
        assert self.manager.usage.free == self.manager.usage.total
        assert self.manager.usage.branches == 0
        self.manager.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
