"""The Triton kernels against the definition, interpreted where there is no GPU."""

import dataclasses

import pytest
import torch

from kernels.attention import PagedBatch
from tests.kernels.cases import Case, assert_close, make_case, pairwise, poisoned
from tests.kernels.naive import naive_attention
from tests.kernels.worker import Worker

BLOCK_SIZES = (8, 16, 32, 64)
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (1, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend(worker: Worker, case: Case, **options: object) -> torch.Tensor:
    """The Triton back end's answer in an output that was NaN before."""
    out = poisoned(case.query)
    args = (case.query, case.kv, case.batch, case.scale, out)
    worker.call("kernels.triton.attention", "paged_attention", *args, **options)
    return out


@pytest.mark.parametrize(("block_size", "head_dim", "group", "dtype"), pairwise(BLOCK_SIZES, HEAD_DIMS, GROUPS, DTYPES))
def test_decode(triton_process, triton_device, seed, block_size, head_dim, group, dtype):
    lengths = [(1, n) for n in (1, block_size - 1, block_size, block_size + 1, 150)]
    case = make_case(
        lengths, seed=seed, block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype, device=triton_device
    )
    result = attend(triton_process, case, splits=1)
    assert_close(result, naive_attention(case.query, case.kv, case.batch, case.scale))


@pytest.mark.parametrize(("block_size", "head_dim", "group", "dtype"), pairwise(BLOCK_SIZES, HEAD_DIMS, GROUPS, DTYPES, seed=1))
def test_mixed(triton_process, triton_device, seed, block_size, head_dim, group, dtype):
    lengths = [(1, 1), (1, 70), (block_size + 1, block_size + 1), (3, block_size), (17, 90), (1, block_size - 1), (70, 75)]
    case = make_case(
        lengths, seed=seed, block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype, device=triton_device
    )
    result = attend(triton_process, case)
    assert_close(result, naive_attention(case.query, case.kv, case.batch, case.scale))
@pytest.mark.parametrize(("block_size", "head_dim", "group", "dtype"), pairwise(BLOCK_SIZES, HEAD_DIMS, GROUPS, DTYPES, seed=2))
def test_split(triton_process, triton_device, seed, block_size, head_dim, group, dtype):
    lengths = [(1, n) for n in (1, block_size - 1, block_size, block_size + 1, 350)]
    case = make_case(
        lengths, seed=seed, block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype, device=triton_device
    )
    result = attend(triton_process, case, splits=4)
    assert_close(result, naive_attention(case.query, case.kv, case.batch, case.scale))
