"""Who runs in the next step, and with how many tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.sequence import Phase, Sequence

if TYPE_CHECKING:
    from cache.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's part of one step: forward `count` tokens from `start` on.

    epoch: the sequence's epoch when it was scheduled; if it moved since, the results are nobody's.
    samples: this part reaches the last known token, so the step also brings the next one.
    """

    sequence: Sequence
    start: int
    count: int
    epoch: int
    samples: bool

    @property
    def stale(self) -> bool:
        return self.epoch != self.sequence.epoch


class Scheduler:
    """Continuous batching with chunked prefill.

    Each step takes running answers first (one token each), then prompts under way, then admits waiting
    requests, all under one token budget. Tenants are admitted in turn. A request is admitted when the blocks
    of its whole prompt are there, with one more to spare for every running sequence, and takes them at once:
    a prompt under way never loses to the answers beside it. If an answer finds no block, the latest admitted
    sequence gives way (`preempt`): its KV stays in the tree as idle, and it is first in line again with what
    it has generated.
    """

    def __init__(self, cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []  # by admission: the last one gives way first
        self.preemptions = 0
        self._waiting: OrderedDict[str, deque[Sequence]] = OrderedDict()  # tenants in the order of their turn
        self._seats = list(range(max_num_seqs))[::-1]
        self._refused: tuple[Sequence, int] | None = None  # who did not fit, and the blocks available then

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        self._waiting.setdefault(sequence.request.tenant, deque()).append(sequence)

    def schedule(self) -> list[Work]:
        """The next step's work, blocks reserved. Empty only if nothing runs and nothing waits.

        Raises `RuntimeError` if a sequence that has the pool to itself finds no room: then the books are
        wrong.
        """
        step: list[Work] = []
        budget = self.max_num_batched_tokens
        preemptions = self.preemptions
        decoding = [sequence for sequence in self.running if sequence.pending == 1]
        prefilling = [sequence for sequence in self.running if sequence.pending > 1]
        for sequence in decoding + prefilling:
            count = min(sequence.pending, budget)
            if count and sequence.phase is Phase.RUNNING and self._make_room(sequence, count):
                step.append(_work(sequence, count))
                budget -= count
        if self.preemptions > preemptions:
            # Whoever gave way is first in line, and nobody is admitted into room that was just short.
            return [work for work in step if not work.stale]
        while budget and len(self.running) < self.max_num_seqs and (admitted := self._admit_next()):
            count = min(admitted.pending, budget)
            step.append(_work(admitted, count))
            budget -= count
        return step

    def end(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is.

        `keep`: its KV stays in the tree, for the next turn to find.
        """
        if sequence.phase is Phase.RUNNING:
            self._stop_running(sequence, keep=keep)
        elif sequence.phase is Phase.WAITING:
            tenant = sequence.request.tenant
            self._waiting[tenant].remove(sequence)
            self._drop_if_empty(tenant)
        sequence.phase = Phase.ENDED
        self._refused = None

    def preempt(self, sequence: Sequence) -> None:
        """Stop a running sequence; it goes on later, from what is then still resident, to the same tokens."""
        self._stop_running(sequence, keep=True)
        tenant = sequence.request.tenant
        self._waiting.setdefault(tenant, deque()).appendleft(sequence)
        self._waiting.move_to_end(tenant, last=False)
        sequence.phase = Phase.WAITING
        self._refused = None
        self.preemptions += 1

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Reserve blocks for `count` more tokens, at the cost of others if need be; False: at its own."""
        assert sequence.table is not None
        while not self.cache.reserve(sequence.table, count):
            if len(self.running) == 1:
                raise RuntimeError(f"no room for {len(sequence.token_ids)} tokens in an otherwise idle pool")
            victim = self._choose_victim()
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _choose_victim(self) -> Sequence:
        """The latest admitted whose end brings blocks back:

        a table all of whose blocks are shared brings none.
        """
        users: Counter[int] = Counter()
        for sequence in self.running:
            users.update(_block_ids(sequence))
        for sequence in reversed(self.running):
            if any(users[block] == 1 for block in _block_ids(sequence)):
                return sequence
        return self.running[-1]

    def _admit_next(self) -> Sequence | None:
        """Start the next tenant's first request, if it fits. If not, nobody overtakes it: it would starve."""
        if not self._waiting:
            return None
        tenant, queue = next(iter(self._waiting.items()))
        sequence = queue[0]
        if self.running and self._refused == (sequence, self.cache.available):
            return None
        if not self._start_running(sequence):
            self._refused = (sequence, self.cache.available)
            return None
        queue.popleft()
        self._waiting.move_to_end(tenant)
        self._drop_if_empty(tenant)
        return sequence

    def _start_running(self, sequence: Sequence) -> bool:
        tokens = sequence.token_ids
        table = self.cache.open(sequence.request.tenant, tokens, sequence.branch)
        block_size = self.cache.block_size
        missing = -(-len(tokens) // block_size) - table.kv_len // block_size
        spare = len(self.running)
        if self.cache.available < missing + spare or not self.cache.reserve(
            table, len(tokens) - table.kv_len
        ):
            self.cache.close(table)
            if not self.running:
                raise RuntimeError(f"no room for {len(tokens)} tokens in an otherwise idle pool")
            return False
        sequence.table = table
        sequence.seat = self._seats.pop()
        sequence.seated_blocks, sequence.seated_version = 0, table.version
        sequence.phase = Phase.RUNNING
        sequence.epoch += 1
        if sequence.prompt_reused is None:
            sequence.prompt_reused = table.reused
        self.running.append(sequence)
        return True

    def _stop_running(self, sequence: Sequence, *, keep: bool) -> None:
        assert sequence.table is not None
        self.cache.close(sequence.table, keep=keep)
        sequence.table = None
        self._seats.append(sequence.seat)
        sequence.epoch += 1
        self.running.remove(sequence)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]


def _work(sequence: Sequence, count: int) -> Work:
    assert sequence.table is not None
    start = sequence.table.kv_len
    return Work(sequence, start, count, sequence.epoch, start + count == len(sequence.token_ids))


def _block_ids(sequence: Sequence) -> list[int]:
    assert sequence.table is not None
    return sequence.table.block_ids
