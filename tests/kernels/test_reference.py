"""The torch back end against the definition: it is what others are compared with at large sizes."""

import math

import pytest
import torch

from kernels import attention
from kernels.reference import gather_sequence
from tests.kernels.cases import assert_close, make_case, pairwise, poisoned
from tests.kernels.naive import naive_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "dtype"),
    pairwise((8, 16, 32, 64), (64, 96, 128, 256), (1, 3, 4, 8), DTYPES, seed=3),
)
def test_torch_back_end_is_attention(seed, block_size, head_dim, group, dtype):
    decodes = [(1, 1), (1, block_size - 1), (1, block_size), (1, 100)]
    chunks = [(block_size + 1, block_size + 1), (3, block_size), (20, 61)]
    case = make_case(
        [*decodes, *chunks],
        seed=seed,
        block_size=block_size,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
    )
    out = poisoned(case.query)
    result = attention.paged_attention(
        case.query, case.kv, case.batch, scale=case.scale, out=out, backend="torch"
    )
    assert result is out
    assert_close(out, naive_attention(case.query, case.kv, case.batch, case.scale))


def test_output_is_allocated_when_none_is_given(seed):
    case = make_case([(1, 9)], seed=seed)
    result = attention.paged_attention(case.query, case.kv, case.batch, scale=case.scale, backend="torch")
    assert_close(result, naive_attention(case.query, case.kv, case.batch, case.scale))


def test_a_batch_of_none_gives_nothing(seed):
    case = make_case([(1, 9)], seed=seed)
    nothing = attention.PagedBatch(
        block_tables=case.batch.block_tables[:0],
        query_starts=case.batch.query_starts[:1],
        kv_lens=case.batch.kv_lens[:0],
        slots=case.batch.slots[:0],
        max_query_len=0,
        max_kv_len=0,
    )
    result = attention.paged_attention(case.query[:0], case.kv, nothing, scale=1.0, backend="torch")
    assert result.shape == (0, *case.query.shape[1:])


def test_what_was_written_is_gathered(seed):
    kv_len = 37
    case = make_case([(kv_len, kv_len)], seed=seed)
    case.pool.fill_(math.nan)
    key, value = torch.randn(2, kv_len, 2, 64)
    attention.write_kv(key, value, case.kv, case.batch.slots, backend="torch")
    keys, values = gather_sequence(case.kv, case.batch.block_tables[0], kv_len)
    assert torch.equal(keys, key)
    assert torch.equal(values, value)
