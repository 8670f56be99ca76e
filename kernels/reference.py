"""Plain torch: the back end that runs everywhere, float64 included, and that the others are measured against.

One sequence at a time: its blocks are gathered, the query heads that share a KV head become rows of one
product (so keys and values are never repeated), and torch's fused attention does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from kernels.attention import PagedBatch


def paged_attention(
    query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float, out: torch.Tensor
) -> None:
    """See `kernels.attention.paged_attention`; reads `query_starts` and `kv_lens` back to the host."""
    kv_heads, head_dim = kv.shape[3:]
    group = query.size(1) // kv_heads
    starts = batch.query_starts.tolist()
    for seq, kv_len in enumerate(batch.kv_lens.tolist()):
        tokens = slice(starts[seq], starts[seq + 1])
        query_len = tokens.stop - tokens.start
        keys, values = gather_sequence(kv, batch.block_tables[seq], kv_len)  # [kv_len, kv_heads, head_dim]
        rows = query[tokens].view(query_len, kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        attended = scaled_dot_product_attention(
            rows[None],  # [1, kv_heads, group * query_len, head_dim]
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=_causal_mask(query_len, kv_len, group, query.device) if query_len > 1 else None,
            scale=scale,
        )[0]
        out[tokens] = attended.view(kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def gather_sequence(kv: torch.Tensor, table: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's keys and values out of its blocks, as copies: two of [kv_len, kv_heads, head_dim]."""
    blocks = table[: -(-kv_len // kv.size(2))]
    # Cut to kv_len before any arithmetic: what lies behind the last token may be NaN.
    keys, values = (kv[:, half].index_select(0, blocks).flatten(0, 1)[:kv_len] for half in (0, 1))
    return keys, values


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """See `kernels.attention.write_kv`."""
    block = slots // kv.size(2)
    offset = slots % kv.size(2)
    kv[block, 0, offset] = key
    kv[block, 1, offset] = value


def _causal_mask(query_len: int, kv_len: int, group: int, device: torch.device) -> torch.Tensor:
    """bool [group * query_len, kv_len], True where a query token may look."""
    positions = torch.arange(kv_len - query_len, kv_len, device=device)
    visible = torch.arange(kv_len, device=device) <= positions[:, None]
    return visible.repeat(group, 1)
