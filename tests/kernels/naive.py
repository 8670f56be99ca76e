"""Attention written down as its definition: float64, one query token and head at a time, every position looked up."""

import torch

from kernels.attention import PagedBatch


def naive_attention(query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float) -> torch.Tensor:
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    block_size, group = kv.size(2), query.size(1) // kv.size(3)
    starts = batch.query_starts.tolist()
    for seq, kv_len in enumerate(batch.kv_lens.tolist()):
        table = batch.block_tables[seq].tolist()
        first_position = kv_len - (starts[seq + 1] - starts[seq])
        for token in range(starts[seq], starts[seq + 1]):
            visible = range(first_position + token - starts[seq] + 1)
            for head in range(query.size(1)):
                spots = [(table[p // block_size], p % block_size) for p in visible]
                keys = torch.stack([kv[block, 0, offset, head // group] for block, offset in spots]).double()
                values = torch.stack([kv[block, 1, offset, head // group] for block, offset in spots]).double()
                weights = torch.softmax(keys @ query[token, head].double() * scale, dim=0)
                out[token, head] = weights @ values
    return out
