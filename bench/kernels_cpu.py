"""Speed of the native attention kernels: `python -m bench.kernels_cpu [--dtype bfloat16] [--seconds 1]`.

Decode is held against the memory bandwidth measured here (reads of a large array), prefill is given in
GFLOP/s of the causal products that count, and torch's own attention runs on the same shape, its keys
and values already contiguous. Contexts lie in blocks in random order, in as many layers as memory-cold
reads need. Each figure is the fastest of many calls: other work on the machine can only slow a call
down.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import native
from kernels.attention import PagedBatch

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
COLD_BYTES = 128 << 20
DECODES = [(kv_len, batch) for kv_len in (128, 1024, 8192) for batch in (1, 32)]
PREFILLS = [(512, 0), (512, 4096), (24, 4096), (8, 4096)]


def fastest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call among those that fit in so many seconds; at least three."""
    best, stop = float("inf"), time.perf_counter() + seconds
    for done in itertools.count():
        begin = time.perf_counter()
        if done >= 3 and begin > stop:
            return best
        call()
        best = min(best, time.perf_counter() - begin)
    raise AssertionError("the count never ends")


def read_bandwidth(seconds: float) -> float:
    """Bytes a second that all threads together read from memory."""
    big = torch.ones(64 << 20)
    return big.numel() * 4 / fastest(big.sum, seconds)


def problem(
    query_len: int, kv_len: int, seqs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], PagedBatch]:
    """A query, one layer's slice of a pool for each layer, and the batch."""
    blocks = -(-kv_len // BLOCK_SIZE)
    token_bytes = 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
    layers = max(1, min(30, COLD_BYTES // (seqs * kv_len * token_bytes)))
    pool = torch.randn(seqs * blocks, layers, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM).to(dtype)
    batch = PagedBatch(
        block_tables=torch.randperm(seqs * blocks).to(torch.int32).view(seqs, blocks),
        query_starts=torch.arange(0, seqs * query_len + 1, query_len, dtype=torch.int32),
        kv_lens=torch.full((seqs,), kv_len, dtype=torch.int32),
        slots=torch.zeros(seqs * query_len, dtype=torch.int64),  # nothing is written here
        max_query_len=query_len,
        max_kv_len=kv_len,
    )
    query = torch.randn(seqs * query_len, Q_HEADS, HEAD_DIM).to(dtype)
    return query, [pool[:, layer] for layer in range(layers)], batch


def native_seconds(query_len: int, kv_len: int, seqs: int, dtype: torch.dtype, seconds: float) -> float:
    query, layers, batch = problem(query_len, kv_len, seqs, dtype)
    layer, out = itertools.cycle(layers), torch.empty_like(query)
    return fastest(lambda: native.paged_attention(query, next(layer), batch, HEAD_DIM**-0.5, out), seconds)


def torch_seconds(query_len: int, kv_len: int, seqs: int, dtype: torch.dtype, seconds: float) -> float:
    query = torch.randn(seqs, Q_HEADS, query_len, HEAD_DIM).to(dtype)
    keys, values = torch.randn(2, seqs, KV_HEADS, kv_len, HEAD_DIM).to(dtype)
    mask = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len) if query_len > 1 else None
    return fastest(
        lambda: scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True), seconds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    if not native.available():
        raise SystemExit(1)
    bandwidth = read_bandwidth(options.seconds)
    print(
        f"{native.features().isa}, {torch.get_num_threads()} threads, {options.dtype}, {Q_HEADS} query "
        f"heads, {KV_HEADS} KV heads of {HEAD_DIM}; memory reads at {bandwidth / 1e9:.1f} GB/s"
    )
    print(f"{'':28}{'us':>10}{'':>12}{'of reads':>10}{'torch us':>12}")
    for kv_len, seqs in DECODES:
        ours = native_seconds(1, kv_len, seqs, dtype, options.seconds)
        peer = torch_seconds(1, kv_len, seqs, dtype, options.seconds)
        rate = seqs * kv_len * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize / ours
        name, share = f"decode {kv_len} x {seqs}", rate / bandwidth
        print(f"{name:28}{ours * 1e6:10.1f}{rate / 1e9:7.1f} GB/s{share:10.0%}{peer * 1e6:12.1f}")
    for query_len, context in PREFILLS:
        ours = native_seconds(query_len, context + query_len, 1, dtype, options.seconds)
        peer = torch_seconds(query_len, context + query_len, 1, dtype, options.seconds)
        pairs = query_len * context + query_len * (query_len + 1) // 2
        rate = 4 * Q_HEADS * HEAD_DIM * pairs / ours
        name = f"prefill {query_len} over {context}"
        print(f"{name:28}{ours * 1e6:10.1f}{rate / 1e9:5.0f} GFLOP/s{'':9}{peer * 1e6:12.1f}")


if __name__ == "__main__":
    main()
