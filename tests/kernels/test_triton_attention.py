"""The Triton kernels against the definition; interpreted where there is no GPU."""

import dataclasses
import math

import pytest
import torch

from tests.kernels.cases import Case, assert_close, make_case, pairwise, poisoned
from tests.kernels.naive import naive_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ("block_size", "head_dim", "group", "dtype")
CHOICES = ((8, 16, 32, 64), (64, 96, 128, 256), (1, 3, 4, 8), DTYPES)


def attend(process, case, out=None, **options):
    """The Triton back end's answer, in an output that was NaN before."""
    out = poisoned(case.query) if out is None else out
    arguments = (case.query, case.kv, case.batch, case.scale, out)
    process.call("kernels.triton.attention", "paged_attention", *arguments, **options)
    return out


def expected(case):
    return naive_attention(case.query, case.kv, case.batch, case.scale)


@pytest.fixture
def build(seed, triton_device):
    def build(lengths, **options) -> Case:
        return make_case(lengths, seed=seed, device=triton_device, **options)

    return build


def decode_lengths(block_size, longest):
    return [(1, kv_len) for kv_len in (1, block_size - 1, block_size, block_size + 1, longest)]


@pytest.mark.parametrize(SHAPES, pairwise(*CHOICES))
def test_decode_is_attention(triton_process, build, block_size, head_dim, group, dtype):
    lengths = decode_lengths(block_size, 150)
    case = build(lengths, block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype)
    assert_close(attend(triton_process, case, splits=1), expected(case))


@pytest.mark.parametrize(SHAPES, pairwise(*CHOICES, seed=1))
def test_split_decode_is_attention(triton_process, build, block_size, head_dim, group, dtype):
    # With four splits the short sequences leave three of them empty, whose partial results nobody writes.
    lengths = decode_lengths(block_size, 350)
    case = build(lengths, block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype)
    assert_close(attend(triton_process, case, splits=4), expected(case))


@pytest.mark.parametrize(SHAPES, pairwise(*CHOICES, seed=2))
def test_prefill_chunks_and_decodes_mix(triton_process, build, block_size, head_dim, group, dtype):
    first_chunks = [(1, 1), (block_size - 1, block_size - 1), (block_size + 1, block_size + 1)]
    later_chunks = [(3, block_size), (17, 90), (70, 75)]
    decodes = [(1, 70), (1, block_size - 1)]
    lengths = [*first_chunks, *decodes, *later_chunks]
    case = build(lengths, block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype)
    assert_close(attend(triton_process, case), expected(case))


@pytest.mark.parametrize("lengths", [[(1, 40), (1, 9)], [(5, 40), (1, 9)]], ids=["decode", "mixed"])
def test_every_kv_head_serves_its_own_group(triton_process, build, lengths):
    case = build(lengths, kv_heads=3, group=3)
    assert_close(attend(triton_process, case), expected(case))


@pytest.mark.parametrize("group", [5, 16, 20])
@pytest.mark.parametrize("query_len", [1, 7])
def test_group_sizes_beyond_the_usual_ones(triton_process, build, group, query_len):
    case = build([(query_len, 30), (1, 5)], kv_heads=1, group=group)
    assert_close(attend(triton_process, case), expected(case))


def test_more_splits_than_tiles(triton_process, build):
    case = build([(1, 1), (1, 65), (1, 16)])
    assert_close(attend(triton_process, case, splits=64), expected(case))


def test_long_context_is_split_by_itself(triton_process, build):
    case = build([(1, 1100)], kv_heads=1)
    assert_close(attend(triton_process, case), expected(case))


@pytest.mark.parametrize("lengths", [[(1, 40), (1, 9)], [(5, 40), (1, 9)]], ids=["decode", "mixed"])
def test_sequences_may_share_blocks(triton_process, build, lengths):
    case = build(lengths)
    tables = case.batch.block_tables
    tables[1, 0] = tables[0, 0]  # the second context begins as the first does
    assert_close(attend(triton_process, case), expected(case))


@pytest.mark.parametrize("lengths", [[(1, 40), (1, 9)], [(5, 40), (1, 9)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("splits", [1, 4])
def test_output_may_be_a_slice_and_nothing_beside_it_is_written(triton_process, build, lengths, splits):
    case = build(lengths, head_dim=96)
    tokens, q_heads, head_dim = case.query.shape
    wide = torch.full((tokens + 1, q_heads + 2, head_dim + 8), math.nan, device=case.query.device)
    out = wide[:tokens, 1 : q_heads + 1, :head_dim]
    attend(triton_process, case, out, splits=splits)
    assert_close(out, expected(case))
    out.fill_(math.nan)
    assert wide.isnan().all()


def test_large_scores_do_not_overflow(triton_process, build):
    case = build([(1, 40), (9, 30)])
    case = dataclasses.replace(
        case, scale=300.0
    )  # weights are 0 or 1; an unshifted exponential would be infinite
    result = attend(triton_process, case)
    torch.testing.assert_close(result.double(), expected(case), rtol=1e-3, atol=1e-3)


def test_offsets_beyond_32_bits(triton_process, triton_device, tmp_path, seed):
    result, wanted = triton_process.call(
        "tests.kernels.far", "attend_far_apart", tmp_path, triton_device, seed
    )
    assert_close(result, wanted)


def test_an_empty_step_launches_nothing(triton_process, build):
    case = build([(1, 3)])
    empty = dataclasses.replace(case, query=case.query[:0])
    assert attend(triton_process, empty).shape == empty.query.shape


def test_same_shapes_give_the_same_bits(triton_process, build):
    case = build([(1, 700), (1, 30)], kv_heads=1)
    assert torch.equal(attend(triton_process, case), attend(triton_process, case))
