"""The proof, at every load, that what will be served is the model: a few tokens compared with transformers
itself.

Two short sequences go through the paged decoder in one batch, one of them in two parts. Positions, the order
of heads, scales, norms and the cache are all in there; a decoder that got one of them wrong is far off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.model.attention import LayerShape
from kernels.attention import PagedBatch

_LENGTHS = (12, 7)
_FIRST_PART = 8
_BLOCK = 16

Sequences = list[torch.Tensor]


def probe_tokens(vocab_size: int, device: torch.device) -> Sequences:
    """Two sequences of made-up token ids, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator).to(device) for n in _LENGTHS]


@torch.inference_mode()
def original_logits(model: Any, tokens: Sequences) -> torch.Tensor:
    """The last logits of each sequence, float32 [sequences, vocab], by the model as transformers runs it."""
    return torch.cat(
        [
            model(input_ids=ids[None], use_cache=False, return_dict=True).logits[0, -1:].float()
            for ids in tokens
        ]
    )


def paged_logits(
    decoder: Any, tokens: Sequences, num_layers: int, shape: LayerShape, dtype: torch.dtype
) -> torch.Tensor:
    """The same by a decoder over paged KV."""
    device = tokens[0].device
    pool = torch.zeros(
        len(tokens) + 1, num_layers, 2, _BLOCK, shape.kv_heads, shape.head_dim, dtype=dtype, device=device
    )
    logits: list[torch.Tensor] = [torch.empty(0)] * len(tokens)
    for parts in ([(0, 0, _FIRST_PART), (1, 0, _LENGTHS[1])], [(0, _FIRST_PART, _LENGTHS[0])]):
        step = torch.cat([tokens[i][start:end] for i, start, end in parts])
        batch, positions = pack([(i + 1, start, end) for i, start, end in parts], device)
        last = batch.query_starts[1:].long() - 1
        for (i, _, _), row in zip(parts, decoder.forward(step, positions, batch, pool, last), strict=True):
            logits[i] = row
    return torch.stack(logits)


def pack(parts: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[PagedBatch, torch.Tensor]:
    """A batch of sequences of one block each: (block, first position, end); and its positions [tokens]."""
    positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
    blocks = torch.cat([torch.full((end - start,), block) for block, start, end in parts])
    lengths = torch.tensor([0] + [end - start for _, start, end in parts])
    batch = PagedBatch(
        block_tables=torch.tensor([[block] for block, _, _ in parts], dtype=torch.int32, device=device),
        query_starts=lengths.cumsum(0).to(device, torch.int32),
        kv_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32, device=device),
        slots=(blocks * _BLOCK + positions).to(device),
        max_query_len=int(lengths.max()),
        max_kv_len=max(end for _, _, end in parts),
    )
    return batch, positions.to(device)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits are off, as a share of how far they spread. Not a number counts as infinitely far."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    share = float((found - expected).norm() / spread.clamp_min(1e-6))
    return share if share == share else float("inf")


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference that can still be rounding.

    Made-up tokens are hard on 16 bits: two attentions of transformers' own differ by 4 % in bfloat16. A wrong
    scale, order or position is several times further off.
    """
    return {torch.float32: 0.01, torch.float16: 0.1}.get(dtype, 0.35)
