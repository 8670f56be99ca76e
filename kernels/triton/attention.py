"""Paged attention and KV write on a GPU: which kernels with which sizes, and how often the context is split.

Everything is decided from shapes alone, without reading a tensor back and without tuning at run time: the
same shapes always give the same launches, and so the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.attention import PagedBatch
from kernels.triton.attention_kernels import decode_kernel, prefill_kernel, reduce_kernel
from kernels.triton.data_kernels import write_kv_kernel
from kernels.triton.launch import Launch

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
"""Below this much context a split costs more in the reduce than it wins."""

_PROGRAMS_PER_PROCESSOR = 2
_PROCESSORS_WITHOUT_GPU = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """rows: query rows of one program, tokens x heads of a group; tile: context positions of one step."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    out: torch.Tensor,
    *,
    splits: int | None = None,
) -> None:
    """See `kernels.attention.paged_attention`. splits: a power of two instead of `choose_splits`' choice."""
    for launch in plan_attention(query, kv, batch, scale, out, splits=splits):
        launch.run()


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """See `kernels.attention.write_kv`."""
    if key.size(0):
        plan_write_kv(key, value, kv, slots).run()


def plan_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    out: torch.Tensor,
    *,
    splits: int | None = None,
) -> list[Launch]:
    """The launches that compute `out`, in order: prefill, or decode, or split decode and reduce."""
    if query.size(0) == 0:
        return []
    if batch.max_query_len > 1:
        return [_plan_prefill(query, kv, batch, scale, out)]
    if splits is None:
        splits = choose_splits(query.size(0), kv.size(3), batch.max_kv_len, processors_of(query.device))
    if splits == 1:
        return [_plan_decode(query, kv, batch, scale, out, out, splits)]
    partial = query.new_empty((query.size(0), query.size(1), splits, query.size(2)), dtype=torch.float32)
    lse = query.new_empty((query.size(0), query.size(1), splits), dtype=torch.float32)
    return [_plan_decode(query, kv, batch, scale, partial, lse, splits), _plan_reduce(out, partial, lse)]


def plan_write_kv(key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> Launch:
    """One program a token, keys and values together."""
    tokens, kv_heads, head_dim = key.shape
    arguments = {
        "key_ptr": key,
        "value_ptr": value,
        "kv_ptr": kv,
        "slots_ptr": slots,
        "key_token": key.stride(0),
        "key_head": key.stride(1),
        "value_token": value.stride(0),
        "value_head": value.stride(1),
        **_kv_strides(kv),
        "BLOCK_SIZE": kv.size(2),
        "HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": _power_of_two(kv_heads * head_dim),
    }
    return Launch(write_kv_kernel, (tokens, 1, 1), arguments)


def choose_splits(seqs: int, kv_heads: int, max_kv_len: int, processors: int) -> int:
    """Into how many parts each context is split: enough programs to fill the GPU, none of them too short.

    A power of two, so that few variants of the kernels are compiled. 1 means no reduce step.
    """
    wanted = processors * _PROGRAMS_PER_PROCESSOR // (seqs * kv_heads)
    useful = max_kv_len // MIN_SPLIT_TOKENS
    return 1 << (max(1, min(wanted, useful, MAX_SPLITS)).bit_length() - 1)


@lru_cache(maxsize=64)
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small fixed number where there is none and kernels are interpreted."""
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_sizes(dtype: torch.dtype, head_dim: int, group: int) -> Sizes:
    """Enough in flight to keep memory busy, little enough for two or three programs on a processor."""
    rows = max(16, _power_of_two(group))
    if dtype.itemsize > 2:
        # No matrix unit multiplies float32 exactly: it is plain arithmetic, which eats registers.
        return Sizes(rows, tile=16, num_warps=8, num_stages=2)
    # A padded head costs registers for its mask.
    small = head_dim <= 128 and head_dim == _power_of_two(head_dim)
    return Sizes(rows, tile=64 if small else 32, num_warps=4, num_stages=3)


def prefill_sizes(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int) -> Sizes:
    """As many query rows as registers allow, fewer when the longest query cannot fill them."""
    if dtype.itemsize > 2:
        return Sizes(max(16, _power_of_two(group)), tile=16, num_warps=8, num_stages=2)
    most = 128 if head_dim <= 128 else 32
    rows = max(16, _power_of_two(group), min(most, _power_of_two(max_query_len * group)))
    return Sizes(rows, tile=32, num_warps=8 if rows * _power_of_two(head_dim) >= 8192 else 4, num_stages=3)


def _plan_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    splits: int,
) -> Launch:
    seqs, q_heads, head_dim = query.shape
    kv_heads = kv.size(3)
    group = q_heads // kv_heads
    sizes = decode_sizes(query.dtype, head_dim, group)
    arguments = {
        "out_ptr": out,
        "lse_ptr": lse,
        "kv_lens_ptr": batch.kv_lens,
        **_attention_arguments(query, kv, batch, scale, out),
        "HEADS": q_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": _power_of_two(head_dim),
        "BLOCK_SIZE": kv.size(2),
        "ROWS": sizes.rows,
        "TILE": sizes.tile,
        "SPLITS": splits,
    }
    return Launch(decode_kernel, (kv_heads, splits, seqs), arguments, sizes.num_warps, sizes.num_stages)


def _plan_reduce(out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor) -> Launch:
    seqs, q_heads, splits, head_dim = partial.shape
    arguments = {
        "out_ptr": out,
        "partial_ptr": partial,
        "lse_ptr": lse,
        "out_token": out.stride(0),
        "out_head": out.stride(1),
        "HEADS": q_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": _power_of_two(head_dim),
        "SPLITS": splits,
    }
    return Launch(reduce_kernel, (q_heads, seqs, 1), arguments)


def _plan_prefill(
    query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float, out: torch.Tensor
) -> Launch:
    tokens, q_heads, head_dim = query.shape
    kv_heads = kv.size(3)
    group = q_heads // kv_heads
    seqs = batch.kv_lens.size(0)
    sizes = prefill_sizes(query.dtype, head_dim, group, batch.max_query_len)
    per_program = sizes.rows // group
    arguments = {
        "out_ptr": out,
        "starts_ptr": batch.query_starts,
        "kv_lens_ptr": batch.kv_lens,
        "seqs": seqs,
        **_attention_arguments(query, kv, batch, scale, out),
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": _power_of_two(head_dim),
        "BLOCK_SIZE": kv.size(2),
        "ROWS": sizes.rows,
        "TOKENS": per_program,
        "TILE": sizes.tile,
    }
    grid = (tokens // per_program + seqs, kv_heads, 1)
    return Launch(prefill_kernel, grid, arguments, sizes.num_warps, sizes.num_stages)


def _attention_arguments(
    query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float, out: torch.Tensor
) -> dict[str, object]:
    return {
        "query_ptr": query,
        "kv_ptr": kv,
        "tables_ptr": batch.block_tables,
        "scale_log2": scale * math.log2(math.e),  # the kernels' softmax is base 2
        "out_token": out.stride(0),
        "out_head": out.stride(1),
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        **_kv_strides(kv),
        "tables_row": batch.block_tables.stride(0),
    }


def _kv_strides(kv: torch.Tensor) -> dict[str, int]:
    return dict(zip(("kv_block", "kv_half", "kv_slot", "kv_head"), kv.stride(), strict=False))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
