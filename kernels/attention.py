"""Paged attention: one signature, three back ends.

The KV pool is `[blocks, layers, 2, block_size, kv_heads, head_dim]`; a kernel gets one layer's slice,
`pool[:, layer]`, and takes its strides as they are (int64: a pool is larger than 2 GiB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which query tokens attend to which blocks. Decode and chunked prefill mix freely in one batch.

    The queries of all sequences lie one after another. Query i of sequence s sits at position
    `kv_lens[s] - query_len(s) + i` and sees the KV of positions up to and including its own, which must
    already be written: `kv_lens` counts this step's tokens too.

    block_tables:  int32 [seqs, max_blocks]  rows are padded with any valid index; padding is never read
    query_starts:  int32 [seqs + 1]          prefix sums of the query lengths; query_starts[-1] == tokens
    kv_lens:       int32 [seqs]              KV tokens of each sequence, this step's included; at least 1
    slots:         int64 [tokens]            where each token's KV is written: block * block_size + offset
    max_query_len: longest query of the batch (1: a pure decode step)
    max_kv_len:    longest context of the batch
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    max_query_len: int
    max_kv_len: int
