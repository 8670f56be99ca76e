from __future__ import annotations

import pytest
import torch

from cache.errors import OutOfBlocks
from cache.layout import KVLayout
from cache.paged import PagedKVCache
from examples import paged_kv_cache

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8)


def kv(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, tokens, 3, 4), torch.randn(2, tokens, 3, 4)


@pytest.mark.parametrize("chunks", [[1] * 20, [20], [7, 1, 12], [8, 8], [0, 5]])
def test_what_was_appended_comes_back(chunks: list[int]) -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=5)
    cache.memory.fill_(torch.nan)
    keys, values = kv(sum(chunks))
    sequence = cache.allocate()
    done = 0
    for chunk in chunks:
        cache.append(sequence, keys[:, done : done + chunk], values[:, done : done + chunk])
        done += chunk
    assert torch.equal(cache.gather(sequence).keys, keys)
    assert torch.equal(cache.gather(sequence).values, values)
    assert len(sequence.block_ids) == -(-sum(chunks) // 8)


def test_sequences_do_not_disturb_each_other() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=6)
    parts = {cache.allocate(): kv(20) for _ in range(2)}
    for token in range(20):
        for sequence, (keys, values) in parts.items():
            cache.append(sequence, keys[:, token], values[:, token])
    for sequence, (keys, values) in parts.items():
        assert torch.equal(cache.gather(sequence).keys, keys)
        assert torch.equal(cache.gather(sequence).values, values)


def test_a_token_lies_where_its_slot_says() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=6)
    cache.append(cache.allocate(), *kv(3))
    sequence = cache.allocate()
    keys, values = kv(10)
    cache.append(sequence, keys, values)
    block, offset = divmod(sequence.slot(9), 8)
    assert torch.equal(cache.memory[block, :, 0, offset], keys[:, 9])
    assert torch.equal(cache.memory[block, :, 1, offset], values[:, 9])


def test_a_fork_shares_blocks_until_one_of_the_two_writes() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=6)
    sequence = cache.allocate()
    keys, values = kv(12)
    cache.append(sequence, keys, values)
    fork = cache.fork(sequence)
    assert cache.free_blocks == 4
    more = kv(1)
    cache.append(sequence, *more)
    assert cache.free_blocks == 3
    assert fork.block_ids[0] == sequence.block_ids[0]
    assert torch.equal(cache.gather(fork).keys, keys)
    assert torch.equal(cache.gather(sequence).keys, torch.cat([keys, more[0]], dim=1))
    cache.append(fork, *more)  # alone by now: in place
    assert cache.free_blocks == 3
    cache.free(sequence)
    assert torch.equal(cache.gather(fork).values, torch.cat([values, more[1]], dim=1))
    cache.free(fork)
    assert cache.free_blocks == 6


def test_a_fork_at_a_full_block_copies_nothing() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=3)
    sequence = cache.allocate()
    cache.append(sequence, *kv(8))
    fork = cache.fork(sequence)
    cache.append(fork, *kv(1))
    assert fork.block_ids[0] == sequence.block_ids[0]
    assert cache.free_blocks == 1


def test_without_room_nothing_changes() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=2)
    sequence = cache.allocate()
    keys, values = kv(10)
    cache.append(sequence, keys, values)
    fork = cache.fork(sequence)
    with pytest.raises(OutOfBlocks, match="1 more blocks are needed, 0 are free"):
        cache.append(fork, *kv(1))
    with pytest.raises(OutOfBlocks):
        cache.append(sequence, *kv(7))
    assert torch.equal(cache.gather(fork).keys, keys)
    cache.free(fork)
    cache.append(sequence, *kv(6))
    assert sequence.kv_len == 16


def test_a_freed_sequence_is_gone() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=2)
    sequence = cache.allocate()
    cache.append(sequence, *kv(1))
    cache.free(sequence)
    for use in (cache.free, cache.gather, cache.fork, lambda known: cache.append(known, *kv(1))):
        with pytest.raises(ValueError, match="sequence must be one that this cache allocated"):
            use(sequence)
    assert cache.free_blocks == 2


def test_wrong_shapes_are_refused_by_name() -> None:
    cache = PagedKVCache(LAYOUT, num_blocks=2)
    sequence = cache.allocate()
    keys, values = kv(2)
    with pytest.raises(ValueError, match=r"keys must be \[2, tokens, 3, 4\]"):
        cache.append(sequence, keys[:, :, :2], values)
    with pytest.raises(ValueError, match="values must be as many tokens as keys, 2, got 1"):
        cache.append(sequence, keys, values[:, 0])
    assert sequence.kv_len == 0


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    paged_kv_cache.main()
    assert "100 blocks are free again" in capsys.readouterr().out
