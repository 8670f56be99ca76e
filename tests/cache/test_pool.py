from __future__ import annotations

import pytest

from cache.errors import IntegrityError, OutOfBlocks
from cache.pool import BlockPool


def test_a_block_is_free_again_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert pool.share(block) == 2
    assert pool.give_back(block) == 1
    assert pool.free == 1
    assert pool.give_back(block) == 0
    assert pool.free == 2
    pool.check_integrity()


def test_every_block_can_be_taken_once() -> None:
    pool = BlockPool(5)
    assert {pool.take() for _ in range(5)} == {0, 1, 2, 3, 4}
    with pytest.raises(OutOfBlocks, match="all 5 blocks"):
        pool.take()


def test_giving_back_a_free_block_is_refused() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.give_back(block)
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.give_back(block)
    assert pool.free == 3


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="block 1 is free"):
        BlockPool(2).share(1)


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


@pytest.mark.parametrize(("free", "text"), [([0, 0], "twice"), ([0, 1], "free=True"), ([], "free=False")])
def test_integrity_finds_a_wrong_free_list(free: list[int], text: str) -> None:
    pool = BlockPool(2)
    pool.take()
    pool.check_integrity()
    pool._free[:] = free
    with pytest.raises(IntegrityError, match=text):
        pool.check_integrity()
