"""Sequences over paged KV, a step at a time, with hand-made batches: the engine's work without it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.model.loader import LoadedModel
from kernels.attention import PagedBatch


@dataclass
class Paged:
    """Drives `LoadedModel.forward`. Blocks lie scattered, and what nobody wrote yet is not a number."""

    model: LoadedModel
    block_size: int = 8
    num_blocks: int = 128
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.model.spec
        shape = (self.num_blocks, spec.num_layers, 2, self.block_size, spec.num_kv_heads, spec.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=spec.dtype)
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1))
        self.free: list[int] = order.tolist()

    def step(self, parts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Forward these next tokens of each sequence. Returns the logits of each one's last token."""
        tokens, positions, batch = self.prepare(parts)
        logits = self.model.forward(tokens, positions, batch, self.pool, batch.query_starts[1:].long() - 1)
        assert logits.dtype == torch.float32
        assert logits.shape == (len(parts), self.model.spec.vocab_size)
        return dict(zip(parts, logits, strict=True))

    def prepare(self, parts: dict[str, list[int]]) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
        """Token ids and positions, int64 [tokens], and the batch of a step."""
        slots, positions, kv_lens = [], [], []
        for name, ids in parts.items():
            table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            end = self.lengths[name] = start + len(ids)
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            positions += range(start, end)
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)
            ]
            kv_lens.append(end)
        width = max(len(self.tables[name]) for name in parts)
        counts = torch.tensor([0] + [len(ids) for ids in parts.values()])
        batch = PagedBatch(
            block_tables=torch.tensor(
                [self.tables[name] + [0] * (width - len(self.tables[name])) for name in parts],
                dtype=torch.int32,
            ),
            query_starts=counts.cumsum(0).int(),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            slots=torch.tensor(slots),
            max_query_len=int(counts.max()),
            max_kv_len=max(kv_lens),
        )
        tokens = torch.tensor([token for ids in parts.values() for token in ids])
        return tokens, torch.tensor(positions), batch

    def generate(self, prompts: dict[str, list[int]], count: int, seed: int = 0) -> dict[str, list[int]]:
        """Greedy answers of `count` tokens each. Prompts start at different steps and come in random chunks,
        mixed with the decodes of those that are further."""
        generator = torch.Generator().manual_seed(seed)
        todo = {name: list(ids) for name, ids in prompts.items()}
        answers: dict[str, list[int]] = {name: [] for name in prompts}
        while any(len(answer) < count for answer in answers.values()):
            parts = {}
            for name, ids in todo.items():
                if len(answers[name]) < count and ids and torch.rand(1, generator=generator) < 0.8:
                    chunk = int(torch.randint(1, 40, (1,), generator=generator))
                    parts[name], todo[name] = ids[:chunk], ids[chunk:]
            for name, logits in self.step(parts).items() if parts else ():
                if not todo[name]:
                    answers[name].append(int(logits.argmax()))
                    todo[name] = [answers[name][-1]]
        return answers
