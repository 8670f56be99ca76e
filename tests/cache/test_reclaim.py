"""What goes when room is needed, and what the books say."""

from __future__ import annotations

from cache.manager import KVCacheManager
from cache.tree import Node
from tests.cache.simulation import SimulatedCache
from tests.cache.test_tables import cache, run, words


def need(simulated: SimulatedCache, blocks: int) -> None:
    """Let somebody else need that many blocks for a moment."""
    table = simulated.open("other", [0])
    assert simulated.manager.reserve(table, blocks * simulated.manager.block_size)
    simulated.manager.close(table)
    simulated.check()


def length(simulated: SimulatedCache, branch: str) -> int:
    info = simulated.manager.branch("ann", branch)
    return info.length if info else 0


def test_idle_blocks_are_always_available() -> None:
    simulated = cache(blocks=6)
    simulated.turn("ann", words(12), "chat")
    assert simulated.manager.usage.free == 3
    assert simulated.manager.available == 6
    table = simulated.open("ann", words(13), "chat")
    assert simulated.manager.available == 3
    simulated.manager.close(table)
    need(simulated, 6)
    assert simulated.manager.usage.evicted_blocks == 3
    assert simulated.manager.usage.free == 6


def test_a_context_is_given_up_from_its_end() -> None:
    simulated = cache(blocks=4)
    simulated.turn("ann", words(14), "chat")
    for remaining in (12, 8, 4, 0):
        need(simulated, simulated.manager.usage.free + 1)
        assert length(simulated, "chat") == remaining
        assert simulated.branch_tokens("ann", "chat") == words(remaining)
    assert simulated.manager.usage.branches == 0


def test_the_conversation_used_longest_ago_goes_first_and_as_a_whole() -> None:
    simulated = cache(blocks=7)
    simulated.turn("ann", words(8), "one")
    simulated.turn("ann", words(8, 20), "two")
    simulated.turn("ann", words(8, 40), "three")
    simulated.turn("ann", words(9), "one")
    need(simulated, 3)
    assert (length(simulated, "one"), length(simulated, "two"), length(simulated, "three")) == (9, 0, 4)


def test_what_has_no_name_goes_first() -> None:
    simulated = cache(blocks=6)
    simulated.turn("ann", words(8), "chat")
    simulated.turn("ann", words(8, 20))
    simulated.turn("ann", words(8, 40))
    need(simulated, 4)
    assert length(simulated, "chat") == 8


def test_a_shared_trunk_outlives_its_branches() -> None:
    simulated = cache(blocks=6)
    simulated.turn("ann", words(12), "one")
    simulated.turn("ann", [*words(8), *words(4, 50)], "two")
    need(simulated, 4)
    assert (length(simulated, "one"), length(simulated, "two")) == (8, 8)
    table = simulated.open("ann", words(12), "one")
    assert table.reused == 8
    assert simulated.forward(table, words(12))
    simulated.manager.close(table)
    assert simulated.branch_tokens("ann", "one") == words(12)


def test_the_order_is_the_same_every_time() -> None:
    def survivors() -> list[list[int]]:
        simulated = cache(blocks=12)
        for number in range(6):
            simulated.turn("ann", [*words(4), *words(4, 10 * number)], f"chat {number % 4}")
        need(simulated, 9)
        return [node.tokens for node in simulated.manager._resident.tree]

    assert survivors() == survivors()


def test_another_policy_is_one_function() -> None:
    class LargestTokenFirst:
        def rank(self, leaf: Node) -> tuple[int, ...]:
            return (-max(leaf.tokens),)

    simulated = cache(blocks=3, policy=LargestTokenFirst())
    for first in (20, 40, 0):
        simulated.turn("ann", words(4, first), f"chat {first}")
    need(simulated, 1)
    assert [length(simulated, f"chat {first}") for first in (0, 20, 40)] == [4, 4, 0]


def test_a_conversation_comes_back_after_it_was_reclaimed() -> None:
    simulated = cache(blocks=6)
    simulated.turn("ann", words(10), "chat")
    need(simulated, 6)
    table = simulated.turn("ann", words(12), "chat")
    assert table.reused == 0
    assert simulated.branch_tokens("ann", "chat") == words(12)


def test_a_running_branch_may_lose_its_old_place() -> None:
    simulated = cache(blocks=6)
    simulated.turn("ann", words(10), "chat")
    table = simulated.open("ann", words(24, 50), "chat")
    assert simulated.manager.reserve(table, 24)
    simulated.manager.close(table, keep=False)
    assert simulated.manager.branch("ann", "chat") is None
    assert simulated.manager.usage.free == 6
    simulated.check()


def test_blocks_add_up() -> None:
    simulated = cache()
    simulated.turn("ann", words(6), "idle")
    table = run(simulated, words(9, 50), "running")
    assert simulated.manager.reserve(table, 8)
    usage = simulated.manager.usage
    assert (usage.total, usage.free, usage.idle, usage.pinned, usage.reserved) == (16, 9, 2, 3, 2)
    assert usage.tokens_resident == 15
    assert usage.slots_allocated == 7 * 4
    assert usage.waste == 1 - 15 / 28
    assert (usage.branches, usage.tables) == (1, 1)


def test_an_empty_cache_wastes_nothing() -> None:
    assert KVCacheManager(4).usage.waste == 0


def test_a_conversation_counts_once_whether_it_runs_or_not() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    assert simulated.manager.usage.shared == 0
    table = run(simulated, words(11), "chat")
    assert simulated.manager.usage.shared == 0
    other = simulated.open("ann", [*words(8), 99], "other")
    assert simulated.manager.usage.shared == 2
    simulated.manager.close(table)
    assert simulated.manager.usage.shared == 2
    simulated.manager.close(other)
    assert simulated.manager.usage.shared == 0


def test_two_conversations_share_their_system_prompt() -> None:
    simulated = cache(blocks=64, size=16)
    system = words(300)
    simulated.turn("ann", [*system, *words(40, 1000)], "one")
    before = simulated.manager.usage
    table = simulated.turn("ann", [*system, *words(40, 2000)], "two")
    assert table.reused == 300
    assert simulated.manager.usage.shared == 300 // 16
    # 18 blocks are shared; the rest of the prompt's last block is copied, and the second text fills on
    assert before.free - simulated.manager.usage.free == 22 - 18


def test_hits_are_counted_when_something_is_computed() -> None:
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    assert (simulated.manager.usage.query_tokens, simulated.manager.usage.hit_tokens) == (10, 0)
    simulated.manager.close(simulated.open("ann", words(12), "chat"))  # no room, tries again later
    assert simulated.manager.usage.query_tokens == 10
    table = run(simulated, words(12), "chat")
    assert simulated.forward(table, words(13))
    assert (simulated.manager.usage.query_tokens, simulated.manager.usage.hit_tokens) == (22, 10)


def test_thirty_two_conversations_waste_little() -> None:
    manager = KVCacheManager(2100)
    for number in range(32):
        context = words(200 + 53 * number, 10_000 * number)
        table = manager.open("ann", context, f"{number}")
        assert manager.reserve(table, len(context))
        manager.advance(table, context)
        if number % 2:
            manager.close(table)
    assert 0 < manager.usage.waste < 0.04
