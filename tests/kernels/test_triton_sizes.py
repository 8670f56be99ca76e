"""How often a context is split follows from shapes alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.triton.attention import MAX_SPLITS, MIN_SPLIT_TOKENS, choose_splits


def test_one_long_conversation_fills_the_gpu():
    splits = choose_splits(seqs=1, kv_heads=8, max_kv_len=32768, processors=132)
    assert 132 <= splits * 8 <= 2 * 132


def test_many_conversations_need_no_splits():
    assert choose_splits(seqs=64, kv_heads=8, max_kv_len=32768, processors=132) == 1


def test_short_contexts_are_not_split():
    assert choose_splits(seqs=1, kv_heads=1, max_kv_len=2 * MIN_SPLIT_TOKENS - 1, processors=132) == 1


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 200_000), st.integers(1, 304))
def test_splits_are_a_bounded_power_of_two(seqs, kv_heads, max_kv_len, processors):
    splits = choose_splits(seqs, kv_heads, max_kv_len, processors)
    assert 1 <= splits <= MAX_SPLITS
    assert splits & (splits - 1) == 0
    assert splits == 1 or max_kv_len // splits >= MIN_SPLIT_TOKENS
    assert splits == 1 or splits * seqs * kv_heads <= 2 * processors


@pytest.mark.parametrize("seqs", [1, 2, 4, 8, 16])
def test_more_sequences_never_mean_more_splits(seqs):
    assert choose_splits(seqs, 8, 32768, 132) >= choose_splits(2 * seqs, 8, 32768, 132)
