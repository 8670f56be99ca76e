"""Moving whole blocks on a GPU; see `kernels.blocks`, which validates. The moves of a call happen at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.triton.data_kernels import move_blocks_kernel
from kernels.triton.launch import Launch

_CHUNK = 4096
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_blocks(pool: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """No target may be another's source or target."""
    _move(pool, pool, len(sources), source_ids=sources, target_ids=targets)


def gather_blocks(pool: torch.Tensor, ids: Sequence[int], out: torch.Tensor) -> None:
    _move(pool, out, len(ids), source_ids=ids)


def scatter_blocks(pool: torch.Tensor, ids: Sequence[int], src: torch.Tensor) -> None:
    _move(src, pool, len(ids), target_ids=ids)


def plan_move(
    source: torch.Tensor,
    target: torch.Tensor,
    moves: int,
    source_ids: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
) -> Launch:
    """One launch for all moves. Ids are int64 [moves]; None means 0, 1, 2, ..."""
    size = source[0].numel()
    # Moved as integers of the same width: no dtype of a KV cache may change on the way.
    source_bits, target_bits = (t.view(_BITS[t.element_size()]) for t in (source, target))
    arguments = {
        "source_ptr": source_bits,
        "target_ptr": target_bits,
        "source_ids_ptr": source_ids if source_ids is not None else source_bits,
        "target_ids_ptr": target_ids if target_ids is not None else target_bits,
        "source_block": source.stride(0),
        "target_block": target.stride(0),
        "size": size,
        "SOURCE_BY_ID": source_ids is not None,
        "TARGET_BY_ID": target_ids is not None,
        "CHUNK": _CHUNK,
    }
    return Launch(move_blocks_kernel, (moves, -(-size // _CHUNK), 1), arguments)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    moves: int,
    source_ids: Sequence[int] | None = None,
    target_ids: Sequence[int] | None = None,
) -> None:
    if moves == 0:
        return
    device = source.device
    ids = [
        None if given is None else torch.tensor(given, dtype=torch.int64, device=device)
        for given in (source_ids, target_ids)
    ]
    plan_move(source, target, moves, ids[0], ids[1]).run()
