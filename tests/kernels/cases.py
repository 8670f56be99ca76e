"""Random attention problems over a pool in which everything that must not be read is NaN."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention import PagedBatch

TOLERANCE = {
    # Against float64 on the same inputs: (relative, absolute). What is left is rounding of sums, of the
    # result, and of the softmax weights, which 16-bit kernels multiply with the values in 16 bit.
    torch.float64: (1e-12, 1e-13),
    torch.float32: (2e-5, 4e-6),
    torch.float16: (4e-3, 2e-3),
    torch.bfloat16: (3e-2, 1.6e-2),
}


@dataclass(frozen=True, slots=True)
class Case:
    query: torch.Tensor  # [tokens, q_heads, head_dim], a slice of a wider tensor as after a fused projection
    kv: torch.Tensor  # [blocks, 2, block_size, kv_heads, head_dim], the middle one of three layers
    pool: torch.Tensor  # [blocks, 3, 2, block_size, kv_heads, head_dim]
    batch: PagedBatch
    scale: float


def make_case(
    lengths: Sequence[tuple[int, int]],  # (query_len, kv_len) of each sequence
    *,
    seed: int,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    random_numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_numbers, dtype=torch.float64).to(dtype)

    needed = [math.ceil(kv_len / block_size) for _, kv_len in lengths]
    blocks = sum(needed) + 5
    order = torch.randperm(blocks, generator=random_numbers).tolist()
    nobodys = order.pop()
    pool = torch.full((blocks, 3, 2, block_size, kv_heads, head_dim), math.nan, dtype=dtype)
    tables = torch.full((len(lengths), max(needed) + 2), nobodys, dtype=torch.int32)
    slots = []
    for seq, (query_len, kv_len) in enumerate(lengths):
        owned = [order.pop() for _ in range(needed[seq])]
        tables[seq, : needed[seq]] = torch.tensor(owned)
        for index, block in enumerate(owned):
            filled = min(block_size, kv_len - index * block_size)
            pool[block, 1, :, :filled] = normal(2, filled, kv_heads, head_dim)
        places = [owned[p // block_size] * block_size + p % block_size for p in range(kv_len)]
        slots += places[kv_len - query_len :]
    query_lens = [query_len for query_len, _ in lengths]
    kv_lens = [kv_len for _, kv_len in lengths]
    starts = list(itertools.accumulate(query_lens, initial=0))
    fused = normal(starts[-1], (group + 2) * kv_heads, head_dim).to(device)
    pool = pool.to(device)
    batch = PagedBatch(
        block_tables=tables.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        max_query_len=max(query_lens),
        max_kv_len=max(kv_lens),
    )
    return Case(fused[:, : group * kv_heads], pool[:, 1], pool, batch, head_dim**-0.5)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """An output that shows every element nobody wrote."""
    return torch.full(like.shape, math.nan, dtype=like.dtype, device=like.device)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    relative, absolute = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=relative, atol=absolute)


def pairwise(*choices: Sequence[object], seed: int = 0) -> list[tuple[object, ...]]:
    """Few combinations in which every two values of different parameters meet at least once."""
    rows = list(itertools.product(*choices))
    random.Random(seed).shuffle(rows)

    def pairs(row: tuple[object, ...]) -> set[tuple[tuple[int, object], ...]]:
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
