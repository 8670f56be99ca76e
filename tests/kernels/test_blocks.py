"""Whole blocks moved within a pool, out of it and into it, by both back ends."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import blocks

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPE = (
    3,
    2,
    8,
    3,
    96,
)  # layers, keys and values, block_size, kv_heads, head_dim: not a whole number of chunks


@pytest.fixture(params=["torch", "triton"])
def move(request, triton_process):
    def move(name, *args):
        triton_process.call("kernels.blocks", name, *args, backend=request.param)

    return move


def random_blocks(count, device, dtype=torch.float32):
    """Random bits, so NaN of every kind among them."""
    bits = torch.randint(-128, 128, (count, *SHAPE, dtype.itemsize), dtype=torch.int8, device=device)
    return bits.view(dtype).squeeze(-1)


def same_bits(left, right):
    bits = BITS[left.element_size()]
    return torch.equal(left.view(bits), right.view(bits))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copies_move_exact_bits_and_nothing_else(move, triton_device, dtype):
    pool = random_blocks(7, triton_device, dtype)
    before = pool.clone()
    move("copy_blocks", pool, [5, 0, 5], [1, 3, 6])
    for block, source in enumerate([0, 5, 2, 0, 4, 5, 5]):
        assert same_bits(pool[block], before[source])


def test_a_chain_of_copies_happens_in_its_order(move, triton_device):
    pool = random_blocks(5, triton_device)
    before = pool.clone()
    move("copy_blocks", pool, [0, 1, 2, 3], [1, 2, 0, 1])  # 0 -> 1 -> 2 -> 0, then 3 -> 1
    for block, source in enumerate([0, 3, 0, 3, 4]):
        assert same_bits(pool[block], before[source])


def test_a_target_may_be_a_block_that_was_read_before(move, triton_device):
    pool = random_blocks(3, triton_device)
    before = pool.clone()
    move("copy_blocks", pool, [0, 2], [1, 0])
    for block, source in enumerate([2, 0, 2]):
        assert same_bits(pool[block], before[source])


def test_gathered_blocks_come_back_where_they_are_scattered(move, triton_device):
    pool = random_blocks(6, triton_device, torch.bfloat16)
    before = pool.clone()
    stack = torch.full((3, *SHAPE), math.nan, dtype=pool.dtype, device=triton_device)
    move("gather_blocks", pool, [4, 0, 4], stack)
    assert same_bits(stack, before[[4, 0, 4]])
    assert same_bits(pool, before)
    stack = stack[:2].clone()
    move("scatter_blocks", pool, [1, 5], stack)
    for block, source in enumerate([0, 4, 2, 3, 4, 0]):
        assert same_bits(pool[block], before[source])


def test_moving_no_blocks_changes_nothing(move, triton_device):
    pool = random_blocks(2, triton_device)
    before = pool.clone()
    move("copy_blocks", pool, [], [])
    move("copy_blocks", pool, [1], [1])
    move("gather_blocks", pool, [], pool[:0].clone())
    move("scatter_blocks", pool, [], pool[:0].clone())
    assert same_bits(pool, before)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.tuples(st.integers(0, n), st.integers(0, n)))))
def test_waves_done_all_at_once_equal_copies_done_one_by_one(copies):
    expected, parallel = list(range(7)), list(range(7))
    for source, target in copies:
        expected[target] = expected[source]
    waves = blocks.independent_waves([s for s, _ in copies], [t for _, t in copies])
    for sources, targets in waves:
        assert not set(sources) & set(targets)
        assert len(set(targets)) == len(targets)
        for source, target in zip(sources, targets, strict=True):
            parallel[target] = parallel[source]
    assert parallel == expected


def test_copies_that_don_t_touch_each_other_are_one_wave():
    assert blocks.independent_waves([0, 0, 1], [2, 3, 4]) == [([0, 0, 1], [2, 3, 4])]


POOL = torch.zeros(4, *SHAPE)
STACK = torch.zeros(2, *SHAPE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: blocks.copy_blocks(POOL, [4], [0]), "sources must be block ids from 0 to 3"),
        (lambda: blocks.copy_blocks(POOL, [0], [-1]), "targets must be block ids from 0 to 3"),
        (lambda: blocks.copy_blocks(POOL, [0, 1], [2]), "targets must have as many ids as sources, 2, got 1"),
        (lambda: blocks.gather_blocks(POOL, [0, 4], STACK), "ids must be block ids from 0 to 3"),
        (lambda: blocks.gather_blocks(POOL, [0], STACK), "out must be contiguous"),
        (lambda: blocks.gather_blocks(POOL, [0, 1], STACK.double()), "out must be contiguous"),
        (lambda: blocks.gather_blocks(POOL, [0, 1], STACK.to("meta")), "on cpu"),
        (lambda: blocks.scatter_blocks(POOL, [1, 1], STACK), "ids must all be different"),
        (lambda: blocks.scatter_blocks(POOL, [1, 2, 3], STACK), "src must be contiguous"),
        (lambda: blocks.copy_blocks(POOL[:, 0], [0], [1]), "pool must be"),
        (lambda: blocks.copy_blocks(POOL.transpose(1, 2), [0], [1]), "pool must be"),
        (lambda: blocks.copy_blocks(POOL, [0], [1], backend="cuda"), "backend must be"),
    ],
)
def test_bad_moves_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
