"""Every rule a `PagedBatch` must keep, checked on the host: for tests and debugging, not for each step."""

from __future__ import annotations

import itertools

import torch

from kernels.attention import PagedBatch


def check_batch(batch: PagedBatch, kv: torch.Tensor) -> None:
    """Raise ValueError naming the field of `batch` that breaks its contract with `kv`.

    kv: [blocks, 2, block_size, kv_heads, head_dim], one layer's slice of the pool
    """
    blocks, _, block_size = kv.shape[:3]
    seqs, width = batch.kv_lens.numel(), batch.block_tables.size(-1)
    _expect("kv_lens", batch.kv_lens, torch.int32, 1, kv.device)
    _expect("query_starts", batch.query_starts, torch.int32, 1, kv.device)
    _expect("block_tables", batch.block_tables, torch.int32, 2, kv.device)
    _expect("slots", batch.slots, torch.int64, 1, kv.device)
    if seqs == 0:
        raise ValueError("kv_lens must name at least one sequence")
    if batch.query_starts.numel() != seqs + 1:
        raise ValueError(f"query_starts must have {seqs + 1} entries, got {batch.query_starts.numel()}")
    if batch.block_tables.size(0) != seqs:
        raise ValueError(f"block_tables must have {seqs} rows, got {batch.block_tables.size(0)}")

    starts, kv_lens, slots = batch.query_starts.tolist(), batch.kv_lens.tolist(), batch.slots.tolist()
    query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or any(length < 1 for length in query_lens):
        raise ValueError(f"query_starts must begin at 0 and grow by at least 1, got {starts}")
    if starts[-1] != len(slots):
        raise ValueError(f"slots must have one entry for each of {starts[-1]} tokens, got {len(slots)}")
    if batch.max_query_len != max(query_lens):
        raise ValueError(f"max_query_len must be {max(query_lens)}, got {batch.max_query_len}")
    if batch.max_kv_len < max(kv_lens):
        raise ValueError(f"max_kv_len must be at least {max(kv_lens)}, got {batch.max_kv_len}")
    for seq, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if kv_len < query_len:
            raise ValueError(f"kv_lens[{seq}] must count this step's {query_len} tokens too, got {kv_len}")
        used = -(-kv_len // block_size)
        if used > width:
            raise ValueError(f"block_tables must have {used} columns for sequence {seq}, got {width}")
        table = batch.block_tables[seq, :used].tolist()
        if not all(0 <= block < blocks for block in table):
            raise ValueError(f"block_tables[{seq}] must hold blocks from 0 to {blocks - 1}, got {table}")
        positions = range(kv_len - query_len, kv_len)
        expected = [table[p // block_size] * block_size + p % block_size for p in positions]
        if slots[starts[seq] : starts[seq + 1]] != expected:
            raise ValueError(f"slots of sequence {seq} must be {expected}, where its table puts these tokens")
    if len(set(slots)) != len(slots):
        raise ValueError("slots must all be different: two tokens would be written to the same place")


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.dim() != dims or tensor.device != device:
        raise ValueError(
            f"{name} must be {dtype} with {dims} dimension(s) on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
