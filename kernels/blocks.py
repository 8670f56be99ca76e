"""Moving whole KV blocks, all layers at once: copy-on-write within a pool, and swapping in and out of it.

A pool is `[blocks, layers, 2, block_size, kv_heads, head_dim]`, one block contiguous. Block ids are plain
ints that live on the host, so they are validated here: a wrong id would overwrite another conversation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch

MoveBackend = Literal["triton", "torch"]


def copy_blocks(
    pool: torch.Tensor, sources: Sequence[int], targets: Sequence[int], *, backend: MoveBackend | None = None
) -> None:
    """Copy block `sources[i]` over block `targets[i]`, for each i, as if one after the other.

    So a chain is honoured: after (a -> b, b -> c) in this order, c holds what a held.
    Raises ValueError for ids outside the pool or lists of different length.
    """
    _check_pool(pool)
    _check_ids("sources", sources, pool)
    _check_ids("targets", targets, pool)
    if len(sources) != len(targets):
        raise ValueError(f"targets must have as many ids as sources, {len(sources)}, got {len(targets)}")
    if _pick(pool, backend) == "triton":
        from kernels.triton import data

        for wave_sources, wave_targets in independent_waves(sources, targets):
            data.copy_blocks(pool, wave_sources, wave_targets)
    else:
        for source, target in zip(sources, targets, strict=True):
            pool[target].copy_(pool[source])


def gather_blocks(
    pool: torch.Tensor, ids: Sequence[int], out: torch.Tensor, *, backend: MoveBackend | None = None
) -> None:
    """Copy blocks `ids` of the pool into `out`, one after another.

    out: [len(ids), layers, 2, block_size, kv_heads, head_dim], same dtype and device as the pool
    Raises ValueError for ids outside the pool or an `out` that doesn't fit.
    """
    _check_pool(pool)
    _check_ids("ids", ids, pool)
    _check_stack("out", out, pool, len(ids))
    if _pick(pool, backend) == "triton":
        from kernels.triton import data

        data.gather_blocks(pool, ids, out)
    else:
        torch.index_select(pool, 0, _tensor(ids, pool.device), out=out)


def scatter_blocks(
    pool: torch.Tensor, ids: Sequence[int], src: torch.Tensor, *, backend: MoveBackend | None = None
) -> None:
    """Copy the blocks of `src`, in order, over blocks `ids` of the pool: the inverse of `gather_blocks`.

    src: [len(ids), layers, 2, block_size, kv_heads, head_dim], same dtype and device as the pool
    Raises ValueError for ids outside the pool or named twice, or a `src` that doesn't fit.
    """
    _check_pool(pool)
    _check_ids("ids", ids, pool)
    if len(set(ids)) != len(ids):
        raise ValueError(f"ids must all be different, got {list(ids)}")
    _check_stack("src", src, pool, len(ids))
    if _pick(pool, backend) == "triton":
        from kernels.triton import data

        data.scatter_blocks(pool, ids, src)
    else:
        pool.index_copy_(0, _tensor(ids, pool.device), src)


def independent_waves(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut a list of copies into runs that may each happen at once: no member touches what another writes."""
    waves: list[tuple[list[int], list[int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in zip(sources, targets, strict=True):
        if source == target:
            continue
        if not waves or source in written or target in written or target in read:
            waves.append(([], []))
            read, written = set(), set()
        waves[-1][0].append(source)
        waves[-1][1].append(target)
        read.add(source)
        written.add(target)
    return waves


def _pick(pool: torch.Tensor, backend: MoveBackend | None) -> MoveBackend:
    if backend is None:
        has_triton = pool.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return "triton" if has_triton else "torch"
    if backend not in ("triton", "torch"):
        raise ValueError(f"backend must be 'triton', 'torch' or None, got {backend!r}")
    return backend


def _check_pool(pool: torch.Tensor) -> None:
    if pool.dim() != 6 or not pool[:1].is_contiguous():
        raise ValueError(
            "pool must be [blocks, layers, 2, block_size, kv_heads, head_dim] with each block contiguous, "
            f"got {list(pool.shape)} with strides {list(pool.stride())}"
        )


def _check_ids(name: str, ids: Sequence[int], pool: torch.Tensor) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < pool.size(0)):
        raise ValueError(f"{name} must be block ids from 0 to {pool.size(0) - 1}, got {list(ids)}")


def _check_stack(name: str, stack: torch.Tensor, pool: torch.Tensor, count: int) -> None:
    expected = (count, *pool.shape[1:])
    if (
        stack.shape != expected
        or stack.dtype != pool.dtype
        or stack.device != pool.device
        or not stack.is_contiguous()
    ):
        raise ValueError(
            f"{name} must be contiguous {list(expected)} {pool.dtype} on {pool.device}, "
            f"got {list(stack.shape)} {stack.dtype} on {stack.device}"
        )


def _tensor(ids: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)
