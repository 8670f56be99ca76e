"""The engine itself: requests in, one step at a time, outputs out. It knows no sockets and no processes."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.api import EngineInfo, EngineStats, FinishReason, GenerateRequest, Output, RequestError
from engine.sampler import INVALID, SamplingState
from engine.scheduler import Scheduler, Work
from engine.sequence import Phase, Sequence

if TYPE_CHECKING:
    from cache.manager import KVCacheManager
    from engine.runner import Runner

log = logging.getLogger(__name__)


class Engine:
    """Drives scheduler, cache and runner.

    Not thread-safe: every method is called from the thread that steps. Whatever ends a request (its last
    token, an abort, a failure) leaves exactly one output with a `finish_reason`.
    """

    def __init__(
        self,
        info: EngineInfo,
        cache: KVCacheManager,
        scheduler: Scheduler,
        runner: Runner,
        *,
        seed: int | None = None,
    ) -> None:
        self.info = info
        self.cache = cache
        self.scheduler = scheduler
        self.runner = runner
        self._seeds = None if seed is None else random.Random(seed)
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[Output] = []  # of requests that ended between steps
        self._finished: Counter[str] = Counter()
        self._steps = 0
        self._prompt_tokens = 0
        self._reused_tokens = 0
        self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._outputs)

    def add_request(self, request: GenerateRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never run."""
        self._check(request)
        sampling = request.sampling
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self.info.eos_token_ids)
        max_len = self.info.max_model_len
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(request.prompt_ids) + sampling.max_tokens)
        sequence = Sequence(
            request,
            sampling=SamplingState(
                sampling, seed=None if self._seeds is None else self._seeds.getrandbits(63)
            ),
            stop_ids=frozenset(stop_ids),
            max_len=max_len,
        )
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")

    def release(self, tenant: str, branch: str) -> None:
        """Forget a branch. Requests under way that would name it again when they end no longer do."""
        for sequence in self._sequences.values():
            if (sequence.request.tenant, sequence.branch) == (tenant, branch):
                sequence.branch = None
        self.cache.release(tenant, branch)

    def step(self, between: Callable[[], None] | None = None) -> list[Output]:
        """Compute one step for everything that runs; returns what it brought, with what ended since the last
        step.

        between: called when the results are there but not yet applied; aborts it makes come before them.
        A step that fails ends the requests it ran for with `finish_reason` "error"; the engine goes on.
        Raises `torch.AcceleratorError` when the device is lost: only a new process gets it back.
        """
        step: list[Work] = []
        try:
            step = self.scheduler.schedule()
            if step:
                token_ids = self.runner.run(step, self.cache.take_copies())
                self._steps += 1
                if between is not None:
                    between()
                self._apply(step, token_ids)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            log.exception("a step failed")
            self._fail_running(f"{type(error).__name__}: {error}")
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        usage = self.cache.usage
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            blocks_total=usage.total,
            blocks_free=usage.free,
            blocks_idle=usage.idle,
            blocks_pinned=usage.pinned,
            blocks_reserved=usage.reserved,
            blocks_shared=usage.shared,
            branches=usage.branches,
            tokens_resident=usage.tokens_resident,
            slots_allocated=usage.slots_allocated,
            prefix_queries_tokens=self._prompt_tokens,
            prefix_hits_tokens=self._reused_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated_tokens,
            preemptions=self.scheduler.preemptions,
            evicted_blocks=usage.evicted_blocks,
            copied_blocks=usage.copied_blocks,
            steps=self._steps,
            finished=dict(self._finished),
        )

    def check_integrity(self) -> None:
        """Audit the books of every owner. Raises `AssertionError` with what does not add up."""
        self.cache.check_integrity()
        running = self.scheduler.running
        assert len({sequence.seat for sequence in running}) == len(running), "two sequences share a seat"
        phases = Counter(sequence.phase for sequence in self._sequences.values())
        assert phases[Phase.ENDED] == 0, "an ended sequence is still listed"
        assert phases[Phase.RUNNING] == len(running), "running sequences and the list of them differ"
        assert phases[Phase.WAITING] == self.scheduler.num_waiting, "waiting sequences and the queues differ"
        for sequence in running:
            assert sequence.table is not None, "a running sequence has no table"
            assert sequence.pending >= 1, "a running sequence has nothing left to forward"

    def _check(self, request: GenerateRequest) -> None:
        length, limit, vocab = len(request.prompt_ids), self.info.max_model_len, self.info.vocab_size
        if request.request_id in self._sequences:
            raise RequestError(
                f"request_id {request.request_id!r} is already in use",
                param="request_id",
                code="duplicate_request",
            )
        if not length:
            raise RequestError("the prompt is empty; at least one token is needed", param="prompt_ids")
        if length + 1 > limit:
            raise RequestError(
                f"the context holds {limit} tokens; a prompt of {length} leaves no room for an answer",
                param="prompt_ids",
                code="context_length_exceeded",
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            raise RequestError(f"prompt_ids must be token ids from 0 to {vocab - 1}", param="prompt_ids")

    def _apply(self, step: list[Work], token_ids: list[int]) -> None:
        """Enter a step's results into the books: KV first, then the sampled tokens."""
        sampled = iter(token_ids)
        for work in step:
            token_id = next(sampled) if work.samples else None
            if work.stale:
                continue
            sequence = work.sequence
            assert sequence.table is not None
            self.cache.advance(sequence.table, sequence.token_ids[work.start : work.start + work.count])
            if token_id is not None:
                self._take(sequence, token_id)

    def _take(self, sequence: Sequence, token_id: int) -> None:
        usage = sequence.take_prompt_usage()
        if usage is not None:
            self._prompt_tokens += usage.total
            self._reused_tokens += usage.reused
        if not sequence.request.generate:
            self._end(sequence, "stop")
            return
        if token_id == INVALID:
            self._end(sequence, "error", error="the model's logits are not finite")
            return
        sequence.sampling.accept(token_id)
        finish_reason = sequence.append(token_id)
        self._generated_tokens += 1
        if finish_reason is not None:
            self._end(sequence, finish_reason, [token_id])
        else:
            self._outputs.append(Output(sequence.request.request_id, [token_id], prompt=usage))

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        error: str | None = None,
    ) -> None:
        request = sequence.request
        # After a failure nobody knows what the blocks it wrote hold; nothing may find them.
        self.scheduler.end(sequence, keep=reason != "error")
        del self._sequences[request.request_id]
        self._finished[reason] += 1
        self._outputs.append(Output(request.request_id, token_ids or [], reason, sequence.usage, error))

    def _fail_running(self, error: str) -> None:
        # With nothing running it was an admission that failed; trying it again would fail for ever.
        failed = self.scheduler.running or self._sequences.values()
        for sequence in list(failed):
            self._end(sequence, "error", error=error)
