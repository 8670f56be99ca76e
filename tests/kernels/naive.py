"""Attention as its definition says: float64, one query token and head at a time, every position looked up."""

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
                seen = [kv[table[p // block_size], :, p % block_size, head // group] for p in visible]
                keys, values = torch.stack(seen, dim=1).double()  # each [visible, head_dim]
                weights = torch.softmax(keys @ query[token, head].double() * scale, dim=0)
                out[token, head] = weights @ values
    return out
