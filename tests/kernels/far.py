"""KV that lies gigabytes apart: a sparse file stands for a large pool, and only the pages in use exist."""

import math
from pathlib import Path

import torch

from kernels import attention
from tests.kernels.cases import Case, make_case
from tests.kernels.naive import naive_attention

BLOCK_STRIDE = 3 * 2**28  # elements; the third block is beyond 2**31 bytes, the fourth beyond 2**31 elements


def attend_far_apart(folder: Path, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write KV and attend over it by Triton, with blocks far apart: (result, expected)."""
    case = make_case([(2, 30), (1, 25)], seed=seed, dtype=torch.float16, device=device)
    blocks = case.kv.size(0)
    far = _far_copy(case, folder, blocks)
    # The last tokens' KV arrives through the KV write, which has the same distances to go.
    slots = case.batch.slots
    key, value = (case.kv[slots // 16, half, slots % 16].clone() for half in (0, 1))
    far[slots // 16, :, slots % 16] = math.nan
    attention.write_kv(key, value, far, slots, backend="triton")
    result = attention.paged_attention(case.query, far, case.batch, scale=case.scale, backend="triton")
    return result, naive_attention(case.query, case.kv, case.batch, case.scale)


def _far_copy(case: Case, folder: Path, blocks: int) -> torch.Tensor:
    size = blocks * BLOCK_STRIDE
    if case.kv.device.type == "cuda":
        memory = torch.empty(size, dtype=case.kv.dtype, device=case.kv.device)
    else:
        path = folder / "pool"
        with path.open("wb") as file:
            file.truncate(size * case.kv.element_size())
        memory = torch.from_file(str(path), shared=True, size=size, dtype=case.kv.dtype)
    far = memory.as_strided(case.kv.shape, (BLOCK_STRIDE, *case.kv[0].contiguous().stride()))
    far.copy_(case.kv)
    return far
