"""Branches: fork, truncate, release, and the limit on names."""

from __future__ import annotations

import pytest

from cache.branches import BranchInfo
from cache.errors import BranchRunning
from tests.cache.simulation import SimulatedCache
from tests.cache.test_tables import cache, run, words


def test_a_branch_tells_what_is_resident_of_it() -> None:
    simulated = cache()
    assert simulated.manager.branch("ann", "chat") is None
    simulated.turn("ann", words(10), "chat")
    assert simulated.manager.branch("ann", "chat") == BranchInfo(
        "ann", "chat", length=10, blocks=3, running=False
    )
    assert simulated.manager.branch("bob", "chat") is None
    table = simulated.open("ann", words(12), "chat")
    assert simulated.forward(table, words(12))
    assert simulated.manager.branch("ann", "chat") == BranchInfo(
        "ann", "chat", length=12, blocks=3, running=True
    )


def test_a_branch_that_moves_gives_up_what_only_it_held() -> None:
    simulated = cache()
    simulated.turn("ann", words(14), "chat")
    simulated.turn("ann", [*words(6), 99], "chat")  # another answer instead
    assert simulated.manager.usage.free == 16 - 2
    assert simulated.branch_tokens("ann", "chat") == [*words(6), 99]
    simulated.check()


def test_a_fork_of_two_thousand_tokens_costs_one_block() -> None:
    simulated = cache(blocks=140, size=16)
    simulated.turn("ann", words(2001), "chat")
    free = simulated.manager.usage.free
    info = simulated.manager.fork("ann", "chat", "other")
    assert info == BranchInfo("ann", "other", length=2001, blocks=126, running=False)
    assert simulated.manager.usage.free == free
    assert simulated.manager.usage.shared == 126
    simulated.turn("ann", [*words(2001), 5000, 5001], "chat")  # the first to go on does so in place
    assert simulated.manager.usage.free == free
    table = simulated.turn("ann", [*words(2001), 6000, 6001], "other")
    assert table.reused == 2001
    assert simulated.manager.usage.free == free - 1
    assert simulated.manager.usage.copied_blocks == 1
    assert simulated.branch_tokens("ann", "chat") == [*words(2001), 5000, 5001]
    assert simulated.branch_tokens("ann", "other") == [*words(2001), 6000, 6001]
    simulated.check()


@pytest.mark.parametrize("length", [1, 4, 5, 9, 10])
def test_a_fork_can_begin_anywhere(length: int) -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    info = simulated.manager.fork("ann", "chat", "other", length)
    assert info is not None
    assert info.length == length
    simulated.turn("ann", [*words(length), 99], "other")
    assert simulated.branch_tokens("ann", "other") == [*words(length), 99]
    assert simulated.branch_tokens("ann", "chat") == words(10)
    simulated.check()


def test_a_fork_gets_no_more_than_is_resident() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    info = simulated.manager.fork("ann", "chat", "other", 50)
    assert info is not None
    assert info.length == 10
    assert simulated.manager.fork("ann", "chat", "none", 0) is None
    assert simulated.manager.fork("ann", "nobody", "none") is None
    assert simulated.manager.branch("ann", "none") is None


def test_a_fork_replaces_a_branch_of_that_name() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    simulated.turn("ann", words(10, 50), "other")
    simulated.manager.fork("ann", "chat", "other", 6)
    assert simulated.branch_tokens("ann", "other") == words(6)
    assert simulated.manager.usage.free == 16 - 3
    simulated.check()


def test_a_running_branch_is_forked_as_far_as_it_has_come() -> None:
    simulated = cache()
    table = run(simulated, words(6), "chat")
    assert simulated.manager.fork("ann", "chat", "other") == BranchInfo("ann", "other", 6, 2, running=False)
    assert simulated.forward(table, words(10))
    simulated.manager.close(table, keep=False)
    assert simulated.branch_tokens("ann", "other") == words(6)
    assert simulated.manager.branch("ann", "chat") is None
    assert simulated.manager.usage.free == 16 - 2
    simulated.check()


def test_a_fork_never_points_at_a_block_that_waits_for_its_copy() -> None:
    simulated = cache()
    simulated.turn("ann", words(7), "first")
    table = simulated.open("ann", [*words(6), 99], "chat")
    info = simulated.manager.fork("ann", "chat", "other")
    assert info is not None
    assert info.length == 4
    simulated.manager.close(table)
    assert simulated.branch_tokens("ann", "other") == words(4)
    simulated.check()


def test_a_running_branch_can_neither_be_truncated_nor_forked_onto() -> None:
    simulated = cache()
    simulated.turn("ann", words(6), "other")
    simulated.turn("ann", words(6, 50), "chat")
    table = simulated.open("ann", words(7), "chat")
    with pytest.raises(BranchRunning, match="'chat' is running"):
        simulated.manager.truncate("ann", "chat", 3)
    with pytest.raises(BranchRunning, match="'chat' is running"):
        simulated.manager.fork("ann", "other", "chat")
    simulated.manager.close(table)
    assert simulated.branch_tokens("ann", "chat") == words(6, 50)


@pytest.mark.parametrize("length", range(1, 12))
def test_truncating_frees_the_dead_tail_at_once(length: int) -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    info = simulated.manager.truncate("ann", "chat", length)
    assert info is not None
    assert info.length == min(length, 10)
    assert simulated.manager.usage.tokens_resident == min(length, 10)
    assert simulated.manager.usage.free == 16 - info.blocks
    table = simulated.turn("ann", [*words(length), 99], "chat")
    assert table.reused == min(length, 10)
    assert simulated.manager.usage.copied_blocks == 0, "what nobody else points at is extended in place"
    simulated.check()


def test_truncating_to_nothing_forgets_the_branch() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    assert simulated.manager.truncate("ann", "chat", 0) is None
    assert simulated.manager.truncate("ann", "chat", 5) is None
    assert simulated.manager.usage.free == 16


def test_truncating_keeps_what_another_branch_needs() -> None:
    simulated = cache()
    simulated.turn("ann", words(14), "chat")
    simulated.manager.fork("ann", "chat", "other", 7)
    simulated.manager.truncate("ann", "chat", 2)
    assert simulated.branch_tokens("ann", "other") == words(7)
    assert simulated.branch_tokens("ann", "chat") == words(2)
    assert simulated.manager.usage.free == 16 - 2
    simulated.check()


def test_releasing_frees_what_nobody_else_points_to() -> None:
    simulated = cache()
    simulated.turn("ann", words(14), "chat")
    simulated.turn("ann", [*words(8), 99], "other")
    simulated.manager.release("ann", "chat")
    assert simulated.branch_tokens("ann", "other") == [*words(8), 99]
    assert simulated.manager.usage.free == 16 - 3
    simulated.manager.release("ann", "other")
    simulated.manager.release("ann", "other")
    assert simulated.manager.usage.free == 16
    simulated.check()


def test_releasing_keeps_what_an_unnamed_run_left() -> None:
    simulated = cache()
    simulated.turn("ann", words(6))  # a system prompt, say
    simulated.turn("ann", words(14), "chat")
    simulated.manager.release("ann", "chat")
    assert simulated.manager.usage.tokens_resident == 6
    assert simulated.open("ann", words(14)).reused == 6
    simulated.check()


def test_what_an_unnamed_run_left_is_kept_where_it_was_merged_into() -> None:
    simulated = cache()
    unnamed, named = run(simulated, words(6)), run(simulated, words(6), "chat")
    assert simulated.forward(named, words(7))
    simulated.manager.close(named)
    simulated.manager.close(unnamed)
    simulated.manager.release("ann", "chat")
    assert simulated.manager.usage.tokens_resident == 6
    simulated.check()


def test_a_fork_counts_as_a_use() -> None:
    simulated = cache(blocks=4)
    simulated.turn("ann", words(8), "old")
    simulated.turn("ann", words(8, 20), "new")
    simulated.manager.fork("ann", "old", "fork")
    table = simulated.open("other", [0])
    assert simulated.manager.reserve(table, 8)
    simulated.check()
    assert simulated.branch_tokens("ann", "new") == []
    assert simulated.branch_tokens("ann", "old") == words(8)


def test_a_branch_released_while_it_runs_leaves_nothing() -> None:
    simulated = cache()
    simulated.turn("ann", words(6), "chat")
    table = run(simulated, words(9), "chat")
    simulated.manager.release("ann", "chat")
    simulated.check_table(table, words(9))
    simulated.manager.close(table)
    assert simulated.manager.branch("ann", "chat") is None
    assert simulated.manager.usage.free == 16
    simulated.check()


def test_the_oldest_name_is_forgotten_and_its_kv_stays_as_cache() -> None:
    simulated = cache(max_branches=2)
    simulated.turn("ann", words(6), "one")
    simulated.turn("ann", words(6, 20), "two")
    simulated.turn("ann", words(7), "one")
    simulated.turn("ann", words(6, 40), "three")
    assert simulated.manager.branch("ann", "two") is None
    assert simulated.manager.branch("ann", "one") is not None
    assert simulated.manager.usage.branches == 2
    assert simulated.open("ann", words(7, 20)).reused == 6
    simulated.check()


def test_the_last_of_two_runs_decides_where_their_branch_points() -> None:
    simulated = cache()
    simulated.turn("ann", words(6), "chat")
    first, second = run(simulated, [*words(6), 1], "chat"), run(simulated, [*words(6), 2], "chat")
    simulated.manager.close(first)
    simulated.check()
    simulated.manager.close(second)
    assert simulated.branch_tokens("ann", "chat") == [*words(6), 2]
    assert simulated.manager.usage.free == 16 - 2
    simulated.check()


def test_bad_arguments_are_refused_by_name() -> None:
    manager = SimulatedCache(4, 4).manager
    with pytest.raises(ValueError, match="length must not be negative, got -1"):
        manager.truncate("ann", "chat", -1)
    with pytest.raises(ValueError, match="length must not be negative, got -2"):
        manager.fork("ann", "chat", "other", -2)
    with pytest.raises(ValueError, match="new_branch must differ from branch, got 'chat' twice"):
        manager.fork("ann", "chat", "chat")
