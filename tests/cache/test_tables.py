"""A running sequence: what is found, what is reserved, what is written, what is left."""

from __future__ import annotations

import pytest

from cache.copies import BlockCopy
from cache.manager import KVCacheManager
from cache.table import BlockTable, Table
from tests.cache.simulation import SimulatedCache


def words(count: int, first: int = 0) -> list[int]:
    """Tokens that occur nowhere else."""
    return list(range(first, first + count))


def cache(blocks: int = 16, size: int = 4, **settings: object) -> SimulatedCache:
    return SimulatedCache(blocks, size, **settings)


def run(
    simulated: SimulatedCache, context: list[int], branch: str | None = None, tenant: str = "ann"
) -> Table:
    """A table that is still open, with all of the context computed."""
    table = simulated.open(tenant, context, branch)
    assert simulated.forward(table, context)
    return table


def test_a_second_turn_computes_only_what_is_new() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    table = simulated.open("ann", words(13), "chat")
    assert table.reused == table.kv_len == 10
    assert simulated.manager.take_copies() == []
    assert simulated.forward(table, words(13))
    simulated.check_table(table, words(13))
    assert simulated.manager.usage.free == 16 - 4


def test_the_last_token_is_never_reused() -> None:
    simulated = cache()
    simulated.turn("ann", words(8))
    for length, reused in [(8, 7), (9, 8), (7, 6), (5, 4), (4, 3), (1, 0)]:
        table = simulated.open("ann", words(length))
        assert table.reused == reused
        simulated.manager.close(table)


def test_a_tail_that_is_all_ours_is_extended_in_place() -> None:
    simulated = cache()
    first = simulated.turn("ann", words(6), "chat")
    table = simulated.open("ann", words(7), "chat")
    assert table.block_ids == first.block_ids
    assert simulated.manager.take_copies() == []
    simulated.check()


def test_a_tail_that_continues_otherwise_is_copied() -> None:
    simulated = cache()
    first = simulated.turn("ann", words(7), "chat")
    table = simulated.open("ann", [*words(6), 99], "chat")
    assert table.reused == 6
    assert table.block_ids[0] == first.block_ids[0]
    assert table.block_ids[1] != first.block_ids[1]
    copies = simulated.manager.take_copies()
    assert copies == [BlockCopy(first.block_ids[1], table.block_ids[1], tokens=2)]
    assert simulated.manager.usage.copied_blocks == 1


def test_the_tail_of_a_running_sequence_is_copied_not_shared() -> None:
    simulated = cache()
    first = run(simulated, words(6))
    second = simulated.open("ann", words(7))
    assert second.reused == 6
    assert second.block_ids[1] != first.block_ids[1]
    assert simulated.forward(second, [*words(6), 50])
    assert simulated.forward(first, [*words(6), 60])
    simulated.check_table(first, [*words(6), 60])
    simulated.check_table(second, [*words(6), 50])
    simulated.check()


def test_a_copy_of_a_copy_reads_where_the_content_is_now() -> None:
    simulated = cache()
    first = run(simulated, words(6))
    second = simulated.open("ann", words(7))
    third = simulated.open("ann", words(6))
    copies = simulated.manager.take_copies()
    assert [(copy.source, copy.tokens) for copy in copies] == [
        (first.block_ids[1], 2),
        (first.block_ids[1], 1),
    ]
    assert [copy.target for copy in copies] == [second.block_ids[1], third.block_ids[1]]


def test_the_source_of_a_copy_stays_until_the_copy_is_taken() -> None:
    simulated = cache(blocks=4)
    simulated.turn("ann", words(7))  # two blocks, idle
    table = simulated.open("ann", [*words(6), 99, 98])  # copies the second into a third
    assert simulated.manager.available == 1
    assert not simulated.manager.reserve(table, 2 + 4 + 1)
    simulated.copy()
    assert simulated.manager.available == 2
    assert simulated.manager.reserve(table, 2 + 4 + 1)
    simulated.check_table(table, words(6))
    simulated.check()


def test_without_room_for_a_copy_fewer_tokens_are_reused() -> None:
    simulated = cache(blocks=2)
    simulated.turn("ann", words(7))
    table = simulated.open("ann", [*words(6), 99])
    assert table.reused == 4
    assert simulated.manager.take_copies() == []
    assert simulated.forward(table, [*words(6), 99])  # the idle block goes now
    simulated.check()


def test_a_copy_never_costs_the_prompt_a_block() -> None:
    simulated = cache(blocks=3)
    simulated.turn("ann", words(7))
    context = [*words(6), *words(6, 50)]  # all of the pool: the source has to go
    table = simulated.open("ann", context)
    assert table.reused == 4
    assert simulated.forward(table, context)
    simulated.check()


def test_a_sequence_that_ends_before_its_copy_leaves_nothing() -> None:
    simulated = cache()
    simulated.turn("ann", words(7), "chat")
    before = simulated.manager.usage
    table = simulated.open("ann", [*words(6), 99], "chat")
    simulated.manager.close(table)
    assert simulated.manager.take_copies() == []
    assert simulated.manager.usage == before
    simulated.check()


def test_advancing_before_the_copies_were_taken_is_refused() -> None:
    simulated = cache()
    simulated.turn("ann", words(7))
    table = simulated.open("ann", [*words(6), 99])
    assert simulated.manager.reserve(table, 1)
    with pytest.raises(RuntimeError, match="take_copies"):
        simulated.manager.advance(table, [99])


def test_reserving_is_all_or_nothing() -> None:
    manager = KVCacheManager(4, 4)
    table = manager.open("ann", words(20))
    assert manager.reserve(table, 5)
    assert len(table.block_ids) == 2
    assert manager.reserve(table, 8)
    assert len(table.block_ids) == 2
    before = manager.usage
    assert not manager.reserve(table, 17)
    assert manager.usage == before
    assert manager.reserve(table, 16)
    assert manager.usage.reserved == 4
    manager.close(table)
    assert manager.usage.free == 4


def test_reserved_blocks_are_never_taken_from_running_sequences() -> None:
    simulated = cache(blocks=4)
    first = run(simulated, words(12))
    second = simulated.open("ann", words(9, 100))
    assert simulated.manager.reserve(second, 4)
    assert not simulated.manager.reserve(second, 5)
    simulated.check_table(first, words(12))


@pytest.mark.parametrize("room", [0, 1, 4, 5])
def test_tokens_without_a_slot_are_refused(room: int) -> None:
    manager = KVCacheManager(4, 4)
    table = manager.open("ann", [1])
    assert manager.reserve(table, room)
    slots = -(-room // 4) * 4
    with pytest.raises(ValueError, match=f"tokens must fit into the {slots} reserved slots, got {slots + 1}"):
        manager.advance(table, words(slots + 1))
    manager.advance(table, words(slots))
    assert table.kv_len == slots


def test_the_same_block_computed_twice_is_kept_once() -> None:
    simulated = cache()
    context = words(10)
    first, second = simulated.open("ann", context), simulated.open("ann", context)
    assert simulated.forward(first, context)
    assert simulated.manager.reserve(second, 10)
    old, version = list(second.block_ids), second.version
    assert simulated.forward(second, context)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] == old[2]
    assert second.version == version + 2
    assert simulated.manager.usage.free == 16 - 4
    assert simulated.manager.usage.shared == 2
    simulated.check_table(second, context)
    simulated.check()


def test_a_duplicate_that_is_being_copied_is_freed_after_the_copy() -> None:
    simulated = cache()
    first = run(simulated, words(6))
    assert simulated.forward(first, words(7))
    second = run(simulated, words(7))
    assert second.block_ids[1] != first.block_ids[1]
    third = simulated.open("ann", [*words(7), 99])  # reads the tail of one of the two
    source = next(iter(simulated.manager._copies)).source
    late, early = (second, first) if source.owner is second else (first, second)
    for table in (early, late):
        assert simulated.manager.reserve(table, 1)
        block, offset = divmod(table.slot(7), 4)
        simulated.memory[block][offset] = ("ann", *words(8))
        simulated.manager.advance(table, [7])
    assert not source.attached
    simulated.check()
    free = simulated.manager.usage.free
    simulated.copy()
    assert simulated.manager.usage.free == free + 1
    simulated.check_table(third, words(7))
    simulated.check()


def test_entries_only_change_with_the_version() -> None:
    simulated = cache()
    table = run(simulated, words(3))
    ids, version = list(table.block_ids), table.version
    for length in range(4, 14):
        assert simulated.forward(table, words(length))
        assert table.block_ids[: len(ids)] == ids
        ids = list(table.block_ids)
    assert table.version == version


def test_a_dropped_run_leaves_nothing_of_its_own() -> None:
    simulated = cache()
    simulated.turn("ann", words(6), "chat")
    before = simulated.manager.usage
    table = run(simulated, words(11), "chat")
    simulated.manager.close(table, keep=False)
    after = simulated.manager.usage
    assert (after.free, after.idle, after.tokens_resident) == (
        before.free,
        before.idle,
        before.tokens_resident,
    )
    assert simulated.branch_tokens("ann", "chat") == words(6)
    simulated.check()


def test_a_dropped_run_leaves_its_branch_where_it_was_even_elsewhere() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    table = run(simulated, [*words(3), *words(9, 50)], "chat")
    simulated.manager.close(table, keep=False)
    assert simulated.branch_tokens("ann", "chat") == words(10)
    assert simulated.manager.usage.free == 16 - 3


def test_a_run_that_computed_nothing_changes_nothing() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    before = simulated.manager.usage
    simulated.manager.close(simulated.open("ann", [0, 1, 77], "chat"), keep=True)
    assert simulated.branch_tokens("ann", "chat") == words(10)
    assert simulated.manager.usage == before


def test_a_closed_table_is_of_no_use() -> None:
    manager = KVCacheManager(4, 4)
    table = manager.open("ann", [1])
    manager.close(table)
    for use in (
        manager.close,
        lambda closed: manager.reserve(closed, 1),
        lambda closed: manager.advance(closed, []),
    ):
        with pytest.raises(ValueError, match="table must be an open one of this manager"):
            use(table)
    manager.check_integrity()


def test_tenants_share_nothing() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    table = simulated.open("bob", words(10), "chat")
    assert table.reused == 0
    assert simulated.forward(table, words(10))
    simulated.manager.close(table)
    assert simulated.manager.usage.shared == 0
    assert simulated.manager.usage.free == 16 - 6
    simulated.check()


def test_without_prefix_caching_nothing_is_found_shared_or_left() -> None:
    simulated = cache(enable_prefix_caching=False)
    first, second = (run(simulated, words(10), "chat") for _ in range(2))
    assert not set(first.block_ids) & set(second.block_ids)
    assert second.reused == 0
    simulated.check()
    simulated.manager.close(first)
    simulated.manager.close(second)
    assert simulated.manager.usage.free == 16
    assert simulated.manager.branch("ann", "chat") is None


def test_what_a_leaf_repeats_of_its_sibling_is_dropped() -> None:
    simulated = cache()
    longer = run(simulated, words(6), "long")
    short = run(simulated, words(6), "short")
    assert simulated.forward(longer, words(7))
    simulated.manager.close(longer)
    free = simulated.manager.usage.free
    simulated.manager.close(short)
    assert simulated.manager.usage.free == free + 1
    assert simulated.branch_tokens("ann", "short") == words(6)
    assert simulated.branch_path("ann", "short") == simulated.branch_path("ann", "long")
    simulated.check()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_what_a_sibling_repeats_is_dropped_when_the_longer_one_comes_to_rest(length: int) -> None:
    simulated = cache()
    longer = run(simulated, words(6), "long")
    short = run(simulated, words(6), "short")
    simulated.manager.close(short)
    assert simulated.manager.usage.free == 16 - 3  # the longer one runs: it may still be dropped
    assert simulated.forward(longer, words(length))
    simulated.manager.close(longer)
    assert simulated.manager.usage.free == 16 - -(-length // 4)
    assert simulated.branch_tokens("ann", "short") == words(6)
    simulated.check()


def test_every_equal_sibling_is_looked_at() -> None:
    simulated = cache()
    running = run(simulated, words(5))
    short = run(simulated, words(5), "short")
    longer = run(simulated, words(5), "long")
    simulated.manager.close(short)
    assert simulated.forward(longer, words(6))
    simulated.manager.close(longer)
    assert simulated.branch_path("ann", "short") == simulated.branch_path("ann", "long")
    simulated.check_table(running, words(5))
    simulated.check()


def test_nothing_is_merged_into_a_block_that_waits_for_its_copy() -> None:
    simulated = cache()
    tails = [run(simulated, words(6), "short"), run(simulated, words(7))]
    waiting = simulated.open("ann", [*words(7), 99])
    simulated.manager.close(tails[0])
    assert waiting.tail is not None
    assert not waiting.tail.branches
    simulated.manager.close(waiting)
    simulated.manager.close(tails[1])
    assert simulated.branch_tokens("ann", "short") == words(6)
    simulated.check()


def test_a_block_table_knows_its_room() -> None:
    table = BlockTable(4)
    assert (table.room, table.missing_blocks(0), table.missing_blocks(1), table.missing_blocks(9)) == (
        0,
        0,
        1,
        3,
    )
    table.block_ids, table.kv_len = [7, 3], 5
    assert (table.room, table.missing_blocks(3), table.missing_blocks(4), table.missing_blocks(8)) == (
        3,
        0,
        1,
        2,
    )
    assert [table.slot(position) for position in (0, 3, 4, 7)] == [28, 31, 12, 15]


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        KVCacheManager(4, 0)
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        KVCacheManager(0)
    with pytest.raises(ValueError, match="max_branches must be at least 1, got 0"):
        KVCacheManager(1, max_branches=0)
    manager = KVCacheManager(4)
    with pytest.raises(ValueError, match="tokens must hold at least one token"):
        manager.open("ann", [])
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        manager.reserve(manager.open("ann", [1]), -1)
