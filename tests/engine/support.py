"""A model whose every token depends on the exact KV it reads, and an engine around it.

What the fake model writes as "KV" is the token itself and its position. To choose the next token it reads the
whole context back through the block table, and hashes it. So a wrong block, a stale copy, a lost or doubled
token, a wrong position or a table row that was not updated changes what comes out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cache.manager import KVCacheManager
from engine.api import EngineInfo, GenerateRequest, Output, SamplingParams
from engine.core import Engine
from engine.runner import Runner
from engine.scheduler import Scheduler
from kernels.attention import PagedBatch

VOCAB = 50
EOS = 7
POISON = -(10**6)


def next_token(context: list[int]) -> int:
    """What the fake model says after `context`."""
    return zlib.crc32(repr(context).encode()) % VOCAB


@dataclass
class FakeModel:
    """Stands where a loaded model stands. `fail_at`: forward calls that raise, counted from 0."""

    fail_at: set[int] = field(default_factory=set)
    calls: int = 0
    tokens: int = 0  # forwarded so far

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        call, self.calls = self.calls, self.calls + 1
        self.tokens += len(token_ids)
        if call in self.fail_at:
            raise RuntimeError("the model broke")
        block_size = pool.shape[3]
        kv = pool[:, 0, :, :, 0, 0]  # [blocks, 2, block_size]
        assert len(set(batch.slots.tolist())) == len(token_ids), "two tokens of a step share a slot"
        kv[batch.slots // block_size, 0, batch.slots % block_size] = token_ids.to(pool.dtype)
        kv[batch.slots // block_size, 1, batch.slots % block_size] = positions.to(pool.dtype)
        assert batch.max_query_len == int(batch.query_starts.diff().max())
        assert batch.max_kv_len == int(batch.kv_lens.max())
        logits = torch.zeros(len(last), VOCAB)
        for row, index in enumerate(last.tolist()):
            owner = int((batch.query_starts[1:] > index).nonzero()[0])
            assert index == int(batch.query_starts[owner + 1]) - 1, "only a sequence's last token samples"
            length = int(batch.kv_lens[owner])
            blocks = batch.block_tables[owner, : -(-length // block_size)].long()
            context = kv[blocks].transpose(1, 2).reshape(-1, 2)[:length].long()  # [length, 2]
            assert context[:, 1].tolist() == list(range(length)), (
                "the table does not hold the context in order"
            )
            logits[row, next_token(context[:, 0].tolist())] = 1.0
        return logits


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = True,
    model: FakeModel | None = None,
    seed: int | None = None,
) -> Engine:
    """An engine on the fake model, with the real cache, scheduler, runner and sampler."""
    max_model_len = max_model_len or (num_blocks - 1) * block_size
    cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
    pool = torch.full((num_blocks, 1, 2, block_size, 1, 1), POISON, dtype=torch.int64)
    info = EngineInfo(
        boot_id="test",
        model="fake",
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=2 * block_size * 8,
        dtype="int64",
        device="cpu",
        attention_backend="fake",
    )
    runner = Runner(
        model or FakeModel(),  # type: ignore[arg-type]  # stands in for a loaded model
        pool,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return Engine(info, cache, scheduler, runner, seed=seed)


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int | None = 4,
    *,
    tenant: str = "default",
    branch: str | None = None,
    generate: bool = True,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerateRequest:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
    )
    return GenerateRequest(request_id, prompt, sampling, tenant=tenant, branch=branch, generate=generate)


def expected_answer(asked: GenerateRequest, max_model_len: int) -> list[int]:
    """The fake model's answer to a request that has the engine to itself, from the definition alone."""
    context = list(asked.prompt_ids)
    stops = set(asked.sampling.stop_token_ids) | (set() if asked.sampling.ignore_eos else {EOS})
    limit = max_model_len
    if asked.sampling.max_tokens is not None:
        limit = min(limit, len(context) + asked.sampling.max_tokens)
    while len(context) < limit:
        context.append(next_token(context))
        if context[-1] in stops:
            break
    return context[len(asked.prompt_ids) :]


@dataclass
class Transcript:
    """All outputs of one request put together."""

    token_ids: list[int] = field(default_factory=list)
    last: Output | None = None

    def add(self, output: Output) -> None:
        assert self.last is None or self.last.finish_reason is None, "an output after the end"
        self.token_ids += output.token_ids
        self.last = output


def run_to_end(
    engine: Engine, *requests: GenerateRequest, before_step: Callable[[], None] | None = None
) -> dict[str, Transcript]:
    """Submit, step until nothing is left, and audit the books at every step."""
    for asked in requests:
        engine.add_request(asked)
    transcripts: dict[str, Transcript] = {asked.request_id: Transcript() for asked in requests}
    while engine.has_work:
        if before_step is not None:
            before_step()
        for output in engine.step():
            transcripts.setdefault(output.request_id, Transcript()).add(output)
        engine.check_integrity()
    return transcripts
